#!/bin/sh
# Makes the Debian package of a built program: target/deb/godwit_VERSION_ARCHITECTURE.deb.
#
# Usage: scripts/deb.sh [--out DIRECTORY]
#
# BINARY (target/release/godwit) is the program. It needs the C library of the system that it was built on or
# a newer one; the package says which. Nothing is downloaded, nobody but dpkg-deb and binutils is needed.
set -eu
cd "$(dirname "$0")/.."

out=target/deb
case ${1:-} in
    --out) out=${2:?--out needs a directory} ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
    '') ;;
    *) echo "deb: unknown argument '$1', try --help" >&2; exit 2 ;;
esac
BINARY=${BINARY:-target/release/godwit}

die() {
    echo "deb: $*" >&2
    exit 1
}

command -v dpkg-deb >/dev/null || die "this needs dpkg-deb; 'make install' does without"
[ -x "$BINARY" ] || die "$BINARY is not there: run 'make deb', which builds it"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
architecture=$(dpkg --print-architecture)
# The newest symbols of the C library that the program uses say which one it needs.
glibc=$(objdump -T "$BINARY" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n 1)
[ -n "$version" ] && [ -n "$glibc" ] || die "cannot tell the version of the product or of its C library"

mkdir -p "$out"
tree=$(mktemp -d "$out/tree.XXXXXX")
trap 'rm -rf "$tree"' EXIT
chmod 755 "$tree"
BINARY=$BINARY DESTDIR=$(realpath "$tree") PREFIX=/usr scripts/install.sh

doc=$tree/usr/share/doc/godwit
mkdir -p "$doc" "$tree/DEBIAN"
{
    printf 'Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\nFiles: *\n'
    printf 'Copyright: The authors of Godwit\nLicense: Apache-2.0\n On Debian systems the text is in /usr/share/common-licenses/Apache-2.0.\n'
} >"$doc/copyright"
gzip -9nc CHANGELOG.md >"$doc/changelog.gz"
# Where the README says that they are.
mkdir -p "$doc/docs/pictures"
cp README.md ARCHITECTURE.md LICENSE "$doc/"
cp docs/*.md "$doc/docs/"
cp docs/pictures/* "$doc/docs/pictures/"
find "$doc" -type f -exec chmod 644 {} +

size=$(du -sk --exclude=DEBIAN "$tree" | cut -f1)
sed -e "s/@VERSION@/$version/" -e "s/@ARCHITECTURE@/$architecture/" -e "s/@GLIBC@/${glibc#GLIBC_}/" \
    -e "s/@SIZE@/$size/" packaging/debian/control >"$tree/DEBIAN/control"
(cd "$tree" && find etc -type f | sed 's|^|/|' | sort) >"$tree/DEBIAN/conffiles"
for script in postinst prerm postrm; do
    install -m 755 "packaging/debian/$script" "$tree/DEBIAN/$script"
done
package=$out/godwit_${version}_$architecture.deb
# zstd is not understood by every dpkg that the package is for.
dpkg-deb --root-owner-group -Zxz -z"${DEB_COMPRESSION:-6}" --build "$tree" "$package" >/dev/null || die "dpkg-deb could not make $package"
echo "$package"
