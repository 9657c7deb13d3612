#!/bin/sh
# Puts a built program, its units, manual pages, completions and examples where a system looks for them,
# or takes them away again.
#
# Usage: scripts/install.sh [install|uninstall]
#
# PREFIX (/usr/local) is where everything goes; ETC (/etc) gets the examples; DESTDIR is put before both
# and starts nothing: a package is made of such a directory. Uninstall takes the same PREFIX. BINARY (target/release/godwit) is the program.
# Records of VMs, configuration and images are never touched.
set -eu

prefix=${PREFIX:-/usr/local}
etc=${ETC:-/etc}
dest=${DESTDIR:-}
binary=${BINARY:-target/release/godwit}
cd "$(dirname "$0")/.."

die() {
    echo "install: $*" >&2
    exit 1
}

case $prefix$etc in
    /*) ;;
    *) die "PREFIX and ETC must be absolute paths" ;;
esac
# Debian has its own directory for the completions that packages bring.
zsh=$prefix/share/zsh/site-functions
if [ "$prefix" = /usr ]; then zsh=$prefix/share/zsh/vendor-completions; fi
units=$prefix/lib/systemd/system

# The running system is only told of what went to its own directories.
is_live() {
    [ -z "$dest" ] && [ "$(id -u)" = 0 ] && [ -d /run/systemd/system ]
}

# file MODE SOURCE TARGET
file() {
    install -D -m "$1" "$2" "$dest$3" || die "cannot write $dest$3"
}

pages_and_completions() {
    made=$(mktemp -d)
    trap 'rm -rf "$made"' EXIT
    mkdir "$made/man"
    "$binary" man "$made/man" >/dev/null || die "$binary does not write its manual pages"
    for page in "$made"/man/*.[15]; do
        gzip -9n "$page"
        file 644 "$page.gz" "$prefix/share/man/man${page##*.}/$(basename "$page").gz"
    done
    for shell in bash zsh fish; do
        "$binary" completion $shell >"$made/$shell" || die "$binary does not write completions for $shell"
    done
    file 644 "$made/bash" "$prefix/share/bash-completion/completions/godwit"
    file 644 "$made/zsh" "$zsh/_godwit"
    file 644 "$made/fish" "$prefix/share/fish/vendor_completions.d/godwit.fish"
}

do_install() {
    [ -x "$binary" ] || die "$binary is not there: run 'make build' first"
    pages_and_completions
    file 755 "$binary" "$prefix/bin/godwit"
    strip --strip-debug "$dest$prefix/bin/godwit" 2>/dev/null ||
        echo "install: no strip here, the program keeps its debugging information" >&2
    for unit in packaging/*.service packaging/*.slice packaging/*.target; do
        [ -e "$unit" ] || continue
        sed "s|/usr/local/bin/godwit|$prefix/bin/godwit|g" "$unit" >"$made/unit"
        file 644 "$made/unit" "$units/$(basename "$unit")"
    done
    file 644 packaging/godwit.sysusers "$prefix/lib/sysusers.d/godwit.conf"
    file 644 packaging/godwit.tmpfiles "$prefix/lib/tmpfiles.d/godwit.conf"
    for example in packaging/examples/*.example; do
        file 644 "$example" "$etc/godwit/$(basename "$example")"
    done
    if is_live; then
        systemd-sysusers "$prefix/lib/sysusers.d/godwit.conf"
        systemd-tmpfiles --create "$prefix/lib/tmpfiles.d/godwit.conf"
        systemctl daemon-reload
        case $units in
            /usr/lib/* | /usr/local/lib/*) ;;
            *) echo "install: systemd does not look for units in $units: enable them by their paths, such as 'systemctl enable --now $units/godwit-agent.service'" ;;
        esac
        echo "install: installed; agents and controllers that run take the new program with 'systemctl try-restart godwit-agent godwit-controller'"
    fi
}

do_uninstall() {
    # Refused while VMs run; the units that stand there are stopped and disabled, wherever PREFIX put them.
    if is_live; then GODWIT_UNITS=$units GODWIT_PROGRAM=$dest$prefix/bin/godwit packaging/debian/prerm remove; fi
    for unit in packaging/*.service packaging/*.slice packaging/*.target; do
        [ -e "$unit" ] || continue
        name=$(basename "$unit")
        # What enabled it: a link to it, of another system's /etc too, below DESTDIR.
        if [ -e "$dest$units/$name" ] && [ -d "$dest/etc/systemd/system" ]; then
            find "$dest/etc/systemd/system" -type l -lname "$units/$name" -delete
        fi
        rm -f "$dest$units/$name"
    done
    for example in packaging/examples/*.example; do
        rm -f "$dest$etc/godwit/$(basename "$example")"
    done
    rm -f "$dest$prefix/bin/godwit" "$dest$prefix"/share/man/man1/godwit.1.gz "$dest$prefix"/share/man/man1/godwit-*.1.gz \
        "$dest$prefix"/share/man/man5/godwit-*.5.gz \
        "$dest$prefix/share/bash-completion/completions/godwit" "$dest$zsh/_godwit" \
        "$dest$prefix/share/fish/vendor_completions.d/godwit.fish" \
        "$dest$prefix/lib/sysusers.d/godwit.conf" "$dest$prefix/lib/tmpfiles.d/godwit.conf"
    if is_live; then
        systemctl daemon-reload
        echo "install: removed; records are kept in /var/lib/godwit and /var/lib/godwit-controller, configuration in /etc/godwit"
    fi
}

case ${1:-install} in
    install) do_install ;;
    uninstall) do_uninstall ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0" ;;
    *) die "unknown argument '$1', try --help" ;;
esac
