#!/bin/sh
# Makes what tests start: Debian 12 and 13 as their packages make them, below target/debian.
#
# Usage: scripts/debian-images.sh containers|machines|guest
#   containers   SUITE.tar: a root file system with systemd and QEMU, for systemd-nspawn (make test)
#   machines     SUITE/disk.raw, vmlinuz, initrd: a whole Debian with its own kernel (make stock-vm)
#   guest        bookworm-guest.raw: a disk that a BIOS boots, with systemd, PostgreSQL, cloud-init and QEMU's guest agent
#                (make test, make demo)
#
# Does nothing when they are there. The mirror is $DEBIAN_MIRROR or the one that this system's apt uses. Nothing of
# this system is changed. Ends with code 3 and one line, why, where such images cannot be made.
set -eu
cd "$(dirname "$0")/.."
dir=$PWD/target/debian
keys=/usr/share/keyrings/debian-archive-keyring.gpg
# Parts of the names of what is made: raise one when that changes.
made=1
guest_made=2

cannot() {
    echo "$*"
    exit 3
}

what=${1:-}
case $what in
    containers | machines | guest) ;;
    *) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
[ "$(id -u)" = 0 ] || cannot "making a Debian root file system needs root"
command -v mmdebstrap >/dev/null || cannot "mmdebstrap is not installed (scripts/install-deps.sh does)"
[ -r "$keys" ] || cannot "Debian's keys are not in $keys: install debian-archive-keyring"
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(ORIGIN) $(RELEASE) $(REPO_URI)' 2>/dev/null |
    awk '$1 == "Debian" && !/security/ { print $3; exit }')}
[ -n "$mirror" ] || cannot "this system's apt names no mirror of Debian: set DEBIAN_MIRROR"

system=systemd,systemd-sysv,dbus,udev,iproute2,kmod,procps
basis=$system,qemu-system-x86,seabios,apt
# The initial file system holds what a machine needs to find its disk, and nothing more.
small_initrd='mkdir -p "$1/etc/initramfs-tools/conf.d"; echo MODULES=list >"$1/etc/initramfs-tools/conf.d/list"; printf "virtio_pci\nvirtio_blk\next4\n" >"$1/etc/initramfs-tools/modules"'

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
    bootstrap "$1" directory "$dir/$1.machine/root" "$basis,initramfs-tools,zstd,$kernel" \
        --dpkgopt='path-exclude=/usr/share/man/*' \
        --essential-hook="$small_initrd"
    root=$dir/$1.machine/root
    payload_of "$root"
    cp "$root"/boot/vmlinuz-* "$dir/$1.machine/vmlinuz"
    cp "$root"/boot/initrd.img-* "$dir/$1.machine/initrd"
    mke2fs -q -t ext4 -d "$root" -E lazy_itable_init=1 "$dir/$1.machine/disk.raw" 3G >/dev/null
    rm -rf "$root"
    mv "$dir/$1.machine" "$dir/$1-$made"
}

# What makes a Debian the tests' guest: an address, a root shell at its serial console and for everybody at TCP port 23, and
# none of the units that only take time under emulation.
guest_of() {
    etc=$1/etc
    echo "/dev/vda1 / ext4 defaults 0 1" >"$etc/fstab"
    echo debian >"$etc/hostname"
    mkdir -p "$etc/systemd/system/serial-getty@ttyS0.service.d"
    cat >"$etc/systemd/system/serial-getty@ttyS0.service.d/root.conf" <<'S'
[Service]
ExecStart=
ExecStart=-/sbin/agetty --autologin root --keep-baud 115200 %I vt220
S
    cat >"$etc/systemd/system/shell.socket" <<'S'
[Socket]
ListenStream=23
Accept=yes
[Install]
WantedBy=sockets.target
S
    cat >"$etc/systemd/system/shell@.service" <<'S'
[Unit]
CollectMode=inactive-or-failed
[Service]
ExecStart=-/bin/bash
StandardInput=socket
StandardError=inherit
WorkingDirectory=/
S
    cat >"$etc/systemd/network/guest.network" <<'S'
[Match]
Type=ether
[Network]
Address=10.77.0.10/24
Address=fd77::10/64
LinkLocalAddressing=no
IPv6AcceptRA=no
S
    # Of cloud-init what a test looks at: the rest only takes time. Without a seed it is not begun at all.
    cat >"$etc/cloud/cloud.cfg.d/90_test.cfg" <<'S'
datasource_list: [NoCloud, ConfigDrive]
cloud_init_modules: [write-files, set-hostname, users-groups, ssh]
cloud_config_modules: [runcmd]
cloud_final_modules: [scripts-user]
S
    chroot "$1" systemctl --quiet enable systemd-networkd.service shell.socket
    chroot "$1" systemctl --quiet mask getty@tty1.service e2scrub_reap.service systemd-networkd-wait-online.service \
        systemd-pstore.service systemd-update-utmp.service systemd-update-utmp-runlevel.service dev-hugepages.mount \
        dev-mqueue.mount sys-fs-fuse-connections.mount sys-kernel-config.mount sys-kernel-debug.mount \
        sys-kernel-tracing.mount modprobe@configfs.service modprobe@dm_mod.service modprobe@drm.service \
        modprobe@fuse.service modprobe@loop.service
}

# disk_of ROOT DISK: an empty disk of 2 GiB with one partition, and before it GRUB, which finds kernel and initial file
# system in that by themselves. GRUB's own installer wants to see the disk as a device: its first sector reads what follows it.
disk_of() {
    cat >"$1/boot.cfg" <<'S'
set root=(hd0,msdos1)
linux /vmlinuz root=/dev/vda1 ro console=ttyS0 quiet panic=-1 nokaslr mitigations=off random.trust_cpu=on cryptomgr.notests tsc=reliable no_timer_check net.ifnames=0
initrd /initrd.img
boot
S
    chroot "$1" grub-mkimage -O i386-pc -o /boot.core -p '(hd0,msdos1)/boot' -c /boot.cfg biosdisk part_msdos ext2 linux
    truncate -s 2G "$1/boot.disk"
    echo '2048,,L,*' | chroot "$1" sfdisk --quiet /boot.disk
    dd if="$1/usr/lib/grub/i386-pc/boot.img" of="$1/boot.disk" bs=440 count=1 conv=notrunc status=none
    dd if="$1/boot.core" of="$1/boot.disk" bs=512 seek=1 conv=notrunc status=none
    mv "$1/boot.disk" "$2"
    rm -f "$1/boot.cfg" "$1/boot.core"
}

guest() {
    [ -e "$dir/$1-guest-$guest_made.raw" ] && return
    reachable "$1"
    rm -rf "$dir/$1"-guest-*.raw "$dir/$1.guest"
    mkdir -p "$dir/$1.guest"
    bootstrap "$1" directory "$dir/$1.guest/root" \
        "$system,initramfs-tools,zstd,e2fsprogs,linux-image-cloud-amd64,grub-pc-bin,fdisk,postgresql,cloud-init,qemu-guest-agent" \
        --dpkgopt='path-exclude=/usr/share/man/*' --essential-hook="$small_initrd"
    root=$dir/$1.guest/root disk=$dir/$1.guest/disk.raw
    guest_of "$root"
    disk_of "$root" "$disk"
    # GRUB 2.06 reads no file system that newer versions of mke2fs make by default.
    mke2fs -q -F -t ext4 -O ^metadata_csum_seed,^orphan_file -J size=16 -E offset=1048576,assume_storage_prezeroed=1 \
        -d "$root" "$disk" 2047M >/dev/null
    mv "$disk" "$dir/$1-guest-$guest_made.raw"
    rm -rf "$dir/$1.guest"
}

mkdir -p "$dir"
case $what in
    containers) make=container suites='bookworm trixie' kept="-$made.tar" ;;
    machines) make=machine suites='bookworm trixie' kept="-$made" ;;
    guest) make=guest suites=bookworm kept="-guest-$guest_made.raw" ;;
esac
pids=''
for suite in $suites; do
    $make "$suite" &
    pids="$pids $!"
done
for pid in $pids; do wait "$pid" || exit $?; done
ls -d "$dir"/*"$kept"
