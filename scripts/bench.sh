#!/bin/sh
# Measures moves of memory: Godwit and QEMU's own migration, in the same run, on the same guests.
#
# Usage: scripts/bench.sh [ARGUMENTS OF godwit-bench memory]
#
# Results go to target/bench: memory.json, memory.html, memory.md. QEMU 10.0 and iperf3 are
# fetched where that is possible; what cannot be had is shown as skipped, with the reason.
set -eu
cd "$(dirname "$0")/.."
scripts/install-deps.sh --bench
scripts/fetch-qemu10.sh || echo "bench: goes on without QEMU 10.0" >&2
${CARGO:-cargo} build --release -p godwit -p godwit-testkit -p godwit-bench
target/release/guest-image
exec target/release/godwit-bench memory "$@"
