#!/bin/sh
# Shows the product under KVM on two whole Debians, 12 and 13, also where the CPU has no virtualisation: each runs in an emulated
# machine with its own kernel, systemd, cgroup v2 and a /dev/kvm that runs Linux guests.
#
# Usage: scripts/stock-vm.sh [ARGUMENT...]      arguments of godwit-stock-vm, see its --help
#
# Prints what was shown and what was not; ends with 1 unless all of it was. Needs root, two cores, 7 GiB of memory, 4 GiB of
# disk below target/debian; at most 30 minutes. What was typed and answered is in target/debian/machines/transcript.txt. No
# figure from there says anything about real hardware: an emulated exit costs a hundred times what a real one does.
set -eu
cd "$(dirname "$0")/.."

limit_s=1800
cargo=${CARGO:-cargo}
"$cargo" build --release -p godwit
package=$(scripts/deb.sh)
"$cargo" build --release -p godwit-testkit -p godwit-e2e
[ -s target/guests/linux/vmlinuz ] || target/release/guest-image
images=$(scripts/debian-images.sh machines) || {
    status=$?
    [ "$status" != 3 ] || echo "skipped: $images"
    exit "$status"
}
# shellcheck disable=SC2086
exec timeout --kill-after=10 "$limit_s" target/release/godwit-stock-vm --package "$package" --image $images "$@"
