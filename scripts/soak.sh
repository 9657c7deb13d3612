#!/usr/bin/env bash
# Builds what a soak needs and runs it; arguments go to godwit-soak ('scripts/soak.sh --help').
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$(id -u)" != 0 ]; then
  echo "make soak makes network namespaces and starts virtual machines: run it as root" >&2
  exit 2
fi
cargo=${CARGO:-cargo}
# Apart: what is built together has the features of both, and the product has no faults on purpose.
"$cargo" build --release -q -p godwit-e2e --bin godwit-soak
"$cargo" build --release -q -p godwit
exec target/release/godwit-soak "$@"
