#!/bin/sh
# Makes what the tests of a stock host start: Debian 12 and 13 as their packages make them, below target/debian.
#
# Usage: scripts/debian-images.sh containers|machines
#   containers   SUITE.tar: a root file system with systemd and QEMU, for systemd-nspawn (make test)
#   machines     SUITE/disk.raw, vmlinuz, initrd: a whole Debian with its own kernel (make stock-vm)
#
# Does nothing when they are there. The mirror is $DEBIAN_MIRROR or the one that this system's apt uses. Nothing of
# this system is changed. Ends with code 3 and one line, why, where such images cannot be made.
set -eu
cd "$(dirname "$0")/.."
dir=$PWD/target/debian
keys=/usr/share/keyrings/debian-archive-keyring.gpg
# Part of the names of what is made: raise it when that changes.
made=1

cannot() {
    echo "$*"
    exit 3
}

what=${1:-}
case $what in
    containers | machines) ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
[ "$(id -u)" = 0 ] || cannot "making a Debian root file system needs root"
command -v mmdebstrap >/dev/null || cannot "mmdebstrap is not installed (scripts/install-deps.sh does)"
[ -r "$keys" ] || cannot "Debian's keys are not in $keys: install debian-archive-keyring"
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(ORIGIN) $(RELEASE) $(REPO_URI)' 2>/dev/null |
    awk '$1 == "Debian" && !/security/ { print $3; exit }')}
[ -n "$mirror" ] || cannot "this system's apt names no mirror of Debian: set DEBIAN_MIRROR"

basis=systemd,systemd-sysv,dbus,udev,iproute2,kmod,procps,qemu-system-x86,seabios,apt

# reachable SUITE: whether the mirror gives it now. A mirror that is away is no fault of what is tested.
reachable() {
    /usr/lib/apt/apt-helper download-file "${mirror%/}/dists/$1/InRelease" "$dir/$1.InRelease" >/dev/null 2>&1 ||
        cannot "the mirror of Debian does not give $1 now"
    rm -f "$dir/$1.InRelease"
}

# bootstrap SUITE FORMAT TARGET PACKAGES [ARGUMENT...]
bootstrap() {
    suite=$1 format=$2 target=$3 packages=$4
    shift 4
    {
        echo "deb [signed-by=$keys] $mirror $suite main"
        if [ "$suite:$what" = bookworm:machines ]; then echo "deb [signed-by=$keys] $mirror bookworm-backports main"; fi
    } >"$dir/$suite.$what.list"
    mmdebstrap --quiet --variant=apt --mode=root --format="$format" \
        --aptopt='APT::Install-Recommends "false"' --aptopt="APT::Default-Release \"$suite\"" \
        --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-include=/usr/share/doc/godwit/*' --include="$packages" \
        --customize-hook='echo "$(od -An -N16 -tx1 /dev/urandom | tr -d " \n")" >"$1/etc/machine-id"' \
        --customize-hook='rm -f "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/etc/systemd/system/timers.target.wants/* "$1"/etc/resolv.conf' \
        --customize-hook='mkdir -p "$1/srv/images"' \
        "$@" "$suite" "$target" "$dir/$suite.$what.list" >"$dir/$suite.$what.log" 2>&1 || {
        tail -n 15 "$dir/$suite.$what.log" >&2
        echo "debian-images: $suite could not be made, all of it is in $dir/$suite.$what.log" >&2
        return 1
    }
}

container() {
    [ -e "$dir/$1-$made.tar" ] && return
    reachable "$1"
    rm -f "$dir/$1"-*.tar
    bootstrap "$1" tar "$dir/$1.tar.partial" "$basis"
    mv "$dir/$1.tar.partial" "$dir/$1-$made.tar"
}

# What a test brings on the second disk runs as a unit of its own: the test's root shell.
payload_of() {
    cat >"$1/etc/systemd/system/payload.service" <<'S'
[Unit]
ConditionPathExists=/dev/vdb
[Service]
Type=exec
ExecStart=/bin/sh -c 'mkdir -p /payload && tar xf /dev/vdb -C /payload && exec sh /payload/shell.sh'
Environment=HOME=/root
Restart=always
KillMode=process
[Install]
WantedBy=multi-user.target
S
    mkdir -p "$1/etc/systemd/system/multi-user.target.wants"
    ln -sf ../payload.service "$1/etc/systemd/system/multi-user.target.wants/"
    echo "/dev/vda / ext4 defaults 0 1" >"$1/etc/fstab"
}

machine() {
    [ -e "$dir/$1-$made/disk.raw" ] && return
    reachable "$1"
    rm -rf "$dir/$1"-[0-9]*[0-9] "$dir/$1.machine"
    kernel=linux-image-amd64
    if [ "$1" = bookworm ]; then kernel=linux-image-amd64/bookworm-backports; fi
    mkdir -p "$dir/$1.machine"
    # The initial file system holds what a machine needs to find its disk, and nothing more.
    bootstrap "$1" directory "$dir/$1.machine/root" "$basis,initramfs-tools,zstd,$kernel" \
        --dpkgopt='path-exclude=/usr/share/man/*' \
        --essential-hook='mkdir -p "$1/etc/initramfs-tools/conf.d"; echo MODULES=list >"$1/etc/initramfs-tools/conf.d/list"; printf "virtio_pci\nvirtio_blk\next4\n" >"$1/etc/initramfs-tools/modules"'
    root=$dir/$1.machine/root
    payload_of "$root"
    cp "$root"/boot/vmlinuz-* "$dir/$1.machine/vmlinuz"
    cp "$root"/boot/initrd.img-* "$dir/$1.machine/initrd"
    mke2fs -q -t ext4 -d "$root" -E lazy_itable_init=1 "$dir/$1.machine/disk.raw" 3G >/dev/null
    rm -rf "$root"
    mv "$dir/$1.machine" "$dir/$1-$made"
}

mkdir -p "$dir"
pids=''
for suite in bookworm trixie; do
    if [ "$what" = containers ]; then container $suite & else machine $suite & fi
    pids="$pids $!"
done
for pid in $pids; do wait "$pid" || exit $?; done
if [ "$what" = containers ]; then ls -d "$dir"/*-"$made".tar; else ls -d "$dir"/*-"$made"; fi
