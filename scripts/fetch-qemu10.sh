#!/bin/sh
# Fetches QEMU 10.0 and every library it needs from Debian 13 (trixie) and unpacks them below
# target/peers/qemu-10.0: a peer to measure against. Nothing is installed, the system's own
# packages, lists and configuration are neither read for this nor changed.
#
# Usage: scripts/fetch-qemu10.sh
#
# Does nothing when it is there already. The mirror is the one that the system's own package
# sources name first, or $DEBIAN_MIRROR. Packages are checked against Debian's signing keys.
set -eu

case ${1:-} in
    -h|--help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    '') ;;
    *) echo "fetch-qemu10: unknown argument '$1', try --help" >&2; exit 2 ;;
esac

root=$(cd "$(dirname "$0")/.." && pwd)
final="$root/target/peers/qemu-10.0"
scratch="$final.partial"
keys=/usr/share/keyrings/debian-archive-keyring.gpg

die() {
    echo "fetch-qemu10: $*" >&2
    exit 1
}

if [ -x "$final/qemu-system-x86_64" ]; then
    exit 0
fi
command -v apt-get >/dev/null || die "this needs apt-get to fetch Debian packages"
[ -r "$keys" ] || die "Debian's keys are not in $keys: install debian-archive-keyring"

# The first mirror of Debian itself in the system's sources, old style or new.
system_mirror() {
    cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list \
        /etc/apt/sources.list.d/*.sources 2>/dev/null |
        grep -v '^#' | grep -oE 'https?://[^ ]+/debian/?' | head -n 1
}
mirror=${DEBIAN_MIRROR:-$(system_mirror)}
mirror=${mirror:-http://deb.debian.org/debian}

rm -rf "$scratch"
mkdir -p "$scratch/apt/state/lists/partial" "$scratch/apt/cache/archives/partial" "$scratch/tree"
echo "deb [signed-by=$keys] $mirror trixie main" >"$scratch/apt/sources.list"
: >"$scratch/apt/status"

# An empty list of installed packages makes apt fetch all that QEMU needs, down to the C library.
private_apt() {
    apt-get -q \
        -o Dir::Etc::SourceList="$scratch/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::Etc::Main=/dev/null -o Dir::Etc::Parts=/dev/null -o Dir::Etc::Preferences=/dev/null \
        -o Dir::Etc::PreferencesParts=/dev/null \
        -o Dir::State="$scratch/apt/state" -o Dir::State::status="$scratch/apt/status" \
        -o Dir::Cache="$scratch/apt/cache" -o Acquire::Languages=none \
        -o APT::Architecture=amd64 -o APT::Sandbox::User=root \
        -o Debug::NoLocking=1 "$@"
}
private_apt update || die "cannot read $mirror trixie"
private_apt install -y --no-install-recommends --download-only qemu-system-x86 ||
    die "cannot fetch qemu-system-x86 from $mirror trixie"
for deb in "$scratch"/apt/cache/archives/*.deb; do
    dpkg-deb -x "$deb" "$scratch/tree"
done
rm -rf "$scratch/apt"
[ -x "$scratch/tree/usr/bin/qemu-system-x86_64" ] || die "the packages hold no qemu-system-x86_64"

# QEMU runs with the C library and the loader that it was built with.
cat >"$scratch/qemu-system-x86_64" <<'RUN'
#!/bin/sh
here=$(dirname "$0")
tree=$here/tree
libraries=$tree/usr/lib/x86_64-linux-gnu
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries:$libraries/systemd" \
    "$tree/usr/bin/qemu-system-x86_64" -L "$tree/usr/share/qemu" -L "$tree/usr/share/seabios" "$@"
RUN
chmod 755 "$scratch/qemu-system-x86_64"
rm -rf "$final"
mv "$scratch" "$final"
"$final/qemu-system-x86_64" --version | head -n 1 || die "what was fetched does not run"
