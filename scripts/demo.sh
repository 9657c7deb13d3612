#!/usr/bin/env bash
# Builds what the demo needs and runs it. KEEP=1 leaves everything running.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$(id -u)" != 0 ]; then
  echo "make demo makes network namespaces and starts virtual machines: run it as root" >&2
  exit 2
fi
cargo build --release -p godwit -p godwit-testkit
target/release/guest-image
exec target/release/godwit-demo ${KEEP:+--keep} "$@"
