#!/bin/sh
# Installs from the distribution's packages what the tests and the demo need, and fetches
# (never installs) the distribution's cloud kernel for the guest image.
#
# Usage: scripts/install-deps.sh [--bench] [--report]
#   --bench    also install iperf3, which shows the bench what the network gives
#   --report   also install chromium, which turns the report into a picture (optional)
#
# Does nothing, quickly, when nothing is missing. Knows Debian 12 and 13 and Ubuntu 24.04; on
# anything else it names the programs that are missing and leaves the rest to the reader.
# The kernel package is unpacked under target/guests/kernel; the host's own kernel, boot loader
# and services are left alone.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
kernel_dir="$root/target/guests/kernel"
want_report=no
want_bench=no
for arg in "$@"; do
    case $arg in
        --report) want_report=yes ;;
        --bench) want_bench=yes ;;
        -h|--help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "install-deps: unknown argument '$arg', try --help" >&2; exit 2 ;;
    esac
done

die() {
    echo "install-deps: $*" >&2
    exit 1
}

# The packages that are missing, judged by the file each is needed for: package=file pairs.
missing_packages() {
    for pair in \
        qemu-system-x86=/usr/bin/qemu-system-x86_64 \
        ovmf=/usr/share/OVMF/OVMF_CODE_4M.fd \
        qemu-utils=/usr/bin/qemu-img \
        xfsprogs=/sbin/mkfs.xfs \
        btrfs-progs=/sbin/mkfs.btrfs \
        redis-server=/usr/bin/redis-server \
        busybox-static=/bin/busybox \
        gcc=/usr/bin/gcc \
        libc6-dev=/usr/include/stdio.h \
        make=/usr/bin/make \
        iproute2=/sbin/ip \
        binutils=/usr/bin/strip \
        xz-utils=/usr/bin/xz \
        zstd=/usr/bin/zstd \
        mmdebstrap=/usr/bin/mmdebstrap \
        systemd-container=/usr/bin/systemd-nspawn
    do
        [ -e "${pair#*=}" ] || printf '%s ' "${pair%%=*}"
    done
    if [ "$want_bench" = yes ] && ! command -v iperf3 >/dev/null; then
        printf 'iperf3 '
    fi
    if [ "$want_report" = yes ] && ! command -v chromium >/dev/null; then
        printf 'chromium '
    fi
}

require_apt_root() {
    command -v apt-get >/dev/null ||
        die "missing: $1; this system has no apt-get, install them with its own package manager"
    [ "$(id -u)" = 0 ] ||
        die "missing: $1; installing them needs root, run this as root or: apt-get install $1"
}

# Installs packages while a policy forbids services to start, so that redis-server stays a
# program in a file. A policy that the administrator already has is left in place.
apt_install() {
    policy=/usr/sbin/policy-rc.d
    made_policy=no
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
        made_policy=yes
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT INT TERM
    fi
    redis_was_there=no
    [ -e /usr/bin/redis-server ] && redis_was_there=yes
    apt_update
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" ||
        die "apt-get could not install: $*"
    if [ "$made_policy" = yes ]; then
        rm -f "$policy"
        trap - EXIT INT TERM
    fi
    if [ "$redis_was_there" = no ] && [ -d /run/systemd/system ]; then
        systemctl disable --quiet redis-server.service 2>/dev/null || true
    fi
}

updated=no
apt_update() {
    [ "$updated" = no ] || return 0
    apt-get update -q || die "apt-get update failed, check the network and /etc/apt/sources.list"
    updated=yes
}

# The real kernel package behind the distribution's cloud kernel metapackage.
kernel_package() {
    case $(. /etc/os-release && echo "$ID") in
        ubuntu) meta=linux-image-virtual ;;
        *) meta=linux-image-cloud-amd64 ;;
    esac
    apt-cache depends "$meta" 2>/dev/null | awk '$1 == "Depends:" && $2 ~ /^linux-image-[0-9]/ { print $2; exit }'
}

# Downloads into the cache directory and unpacks there; Ubuntu keeps the modules apart.
fetch_kernel() {
    command -v apt-get >/dev/null ||
        die "no guest kernel in $kernel_dir and no apt-get; put vmlinuz and lib/modules there yourself"
    package=$(kernel_package)
    if [ -z "$package" ]; then
        [ "$(id -u)" = 0 ] || die "the package lists are empty, run 'apt-get update' as root first"
        apt_update
        package=$(kernel_package)
    fi
    [ -n "$package" ] || die "no cloud kernel package in the configured package sources"
    packages=$package
    modules=$(echo "$package" | sed 's/^linux-image-/linux-modules-/')
    if apt-cache show "$modules" >/dev/null 2>&1; then
        packages="$packages $modules"
    fi
    scratch=$kernel_dir.partial
    rm -rf "$scratch"
    mkdir -p "$scratch/debs"
    # As root apt drops to a user who may not write here, which only makes it warn.
    # shellcheck disable=SC2086
    (cd "$scratch/debs" && apt-get -q -o APT::Sandbox::User=root download $packages) || {
        [ "$(id -u)" = 0 ] || die "could not download $packages"
        apt_update
        # shellcheck disable=SC2086
        (cd "$scratch/debs" && apt-get -q -o APT::Sandbox::User=root download $packages) ||
            die "could not download $packages"
    }
    for deb in "$scratch"/debs/*.deb; do
        dpkg-deb -x "$deb" "$scratch"
    done
    rm -rf "$scratch/debs"
    # Debian from forky on and derivatives merge /lib into /usr/lib.
    if [ ! -d "$scratch/lib/modules" ] && [ -d "$scratch/usr/lib/modules" ]; then
        mkdir -p "$scratch/lib"
        mv "$scratch/usr/lib/modules" "$scratch/lib/modules"
    fi
    set -- "$scratch"/boot/vmlinuz-*
    [ -s "$1" ] || die "$package holds no kernel image under /boot"
    version=${1##*/vmlinuz-}
    [ -d "$scratch/lib/modules/$version" ] || die "$packages hold no modules for $version"
    echo "$version" >"$scratch/version"
    rm -rf "$kernel_dir"
    mv "$scratch" "$kernel_dir"
    echo "install-deps: guest kernel $version unpacked in target/guests/kernel"
}

missing=$(missing_packages)
if [ -n "$missing" ]; then
    require_apt_root "$missing"
    # shellcheck disable=SC2086
    apt_install $missing
fi
[ -s "$kernel_dir/version" ] || fetch_kernel
