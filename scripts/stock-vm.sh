#!/bin/sh
# Shows the product under KVM on two whole Debians, 12 and 13, also where the CPU has no virtualisation: each runs in an emulated
# machine with its own kernel, systemd, cgroup v2 and a /dev/kvm that runs Linux guests.
#
# Usage: [LIMIT_S=1740] scripts/stock-vm.sh [ARGUMENT...]      arguments of godwit-stock-vm, see its --help
#
# Prints what was shown and what was not, row by row; ends with 1 unless all of it was, and by itself after at most 30 minutes.
# Needs root, two cores that are idle otherwise, 7 GiB of memory, 5 GiB of disk below target, a mirror of Debian the first time:
# where that is missing it prints 'skipped: why' and ends with 0. What was typed and answered is in
# target/debian/machines/transcript.txt. No figure from there says anything about real hardware: an emulated exit costs a
# hundred times what a real one does.
set -eu
cd "$(dirname "$0")/.."

skipped() {
    echo "skipped: $*"
    exit 0
}

[ "$(id -u)" = 0 ] || skipped "this needs root"
memory_mib=$(awk '/^MemAvailable/ { print int($2 / 1024) }' /proc/meminfo)
[ "$memory_mib" -ge 7000 ] || skipped "two machines of 2.5 GiB need 7 GiB of free memory, here are $memory_mib MiB"
mkdir -p target
disk_mib=$(df -Pm target | awk 'END { print $4 }')
[ -d target/debian/trixie-1 ] || [ "$disk_mib" -ge 5000 ] || skipped "this needs 5 GiB below target, there are $disk_mib MiB"

# QEMU 10 with a thread for each vCPU. With 7.2 and threads the emulated kernel at times runs a breakpoint that it has taken out
# of its own code already, and panics, since KVM patches the scheduler whenever a guest begins or ends; with one thread for both
# vCPUs a guest that boots in 10 s takes more than two minutes.
emulator=qemu-system-x86_64
major=$("$emulator" --version 2>/dev/null | sed -n '1s/.*version \([0-9]*\).*/\1/p')
if [ "${major:-0}" -lt 10 ]; then
    scripts/fetch-qemu10.sh >target/fetch-qemu10.log 2>&1 ||
        skipped "the machines need QEMU 10 as their emulator: $(tail -n 1 target/fetch-qemu10.log)"
    emulator=target/peers/qemu-10.0/qemu-system-x86_64
fi
images=$(scripts/debian-images.sh machines) || {
    status=$?
    [ "$status" != 3 ] || skipped "$images"
    exit "$status"
}

cargo=${CARGO:-cargo}
"$cargo" build --release -p godwit
package=$(scripts/deb.sh)
"$cargo" build --release -p godwit-testkit -p godwit-e2e
[ -s target/guests/linux/vmlinuz ] || target/release/guest-image
limit_s=${LIMIT_S:-1740}
# It keeps its limit itself; the other one is for the case that it cannot.
# shellcheck disable=SC2086
exec timeout --kill-after=10 "$((limit_s + 90))" target/release/godwit-stock-vm --limit-s "$limit_s" --qemu "$emulator" --threads \
    --package "$package" --image $images "$@"
