#!/bin/sh
# Measures moves of memory or of disks: Godwit and QEMU's own migration or block mirror, in the
# same run, on the same guests or volumes.
#
# Usage: scripts/bench.sh [memory|storage] [ARGUMENTS OF godwit-bench memory|storage]
#
# Results go to target/bench: memory.json, memory.html, memory.md, or storage.*. QEMU 10.0 and
# iperf3 are fetched where that is possible; what cannot be had is shown as skipped, with the
# reason, or left out.
set -eu
cd "$(dirname "$0")/.."
what=memory
case ${1:-} in
    memory|storage) what=$1; shift ;;
esac
cargo=${CARGO:-cargo}
scripts/fetch-qemu10.sh || echo "bench: goes on without QEMU 10.0" >&2
if [ "$what" = storage ]; then
    scripts/install-deps.sh
    "$cargo" build --release -p godwit -p godwit-bench
    "$cargo" build --release -p godwit-e2e --bin godwit-disk
else
    scripts/install-deps.sh --bench
    "$cargo" build --release -p godwit -p godwit-testkit -p godwit-bench
    target/release/guest-image
fi
exec target/release/godwit-bench "$what" "$@"
