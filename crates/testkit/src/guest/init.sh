#!/bin/sh
# PID 1 of the Linux test guest until the probe takes over. Reads the kernel command line:
#   godwit.ip4=ADDRESS/LENGTH godwit.ip6=ADDRESS/LENGTH godwit.gw4=ADDRESS godwit.gw6=ADDRESS
#   godwit.redis=no   do not start Redis        godwit.shell   a shell on the console
#   godwit.disk=BYTES,DEPTH,random|sequential,SECONDS   a load on the first disk, and nothing else
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
while read -r module; do
    insmod "/modules/$module" || echo "godwit-guest: $module did not load"
done </modules/order

redis=yes
for word in $(cat /proc/cmdline); do
    case $word in
        godwit.ip4=*) ip4=${word#*=} ;;
        godwit.ip6=*) ip6=${word#*=} ;;
        godwit.gw4=*) gw4=${word#*=} ;;
        godwit.gw6=*) gw6=${word#*=} ;;
        godwit.redis=*) redis=${word#*=} ;;
        godwit.shell) shell=yes ;;
        godwit.disk=*) disk=${word#*=} ;;
    esac
done
[ -z "$disk" ] || exec guest-probe disk "$disk"
# The address is ours by decree: waiting a second for a duplicate would only delay the boot.
echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad
echo 0 >/proc/sys/net/ipv6/conf/all/accept_dad
ip link set lo up
if [ -e /sys/class/net/eth0 ]; then
    echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_dad
    ip link set eth0 up
    [ -z "$ip4" ] || ip addr add "$ip4" dev eth0
    [ -z "$ip6" ] || ip addr add "$ip6" dev eth0
    [ -z "$gw4" ] || ip route add default via "$gw4"
    [ -z "$gw6" ] || ip -6 route add default via "$gw6"
fi
echo 1 >/proc/sys/vm/overcommit_memory
if [ "$redis" = yes ]; then
    redis-server --save '' --appendonly no --protected-mode no --bind '*' '-::*' \
        --loglevel warning --tcp-keepalive 0 --timeout 0 --enable-debug-command yes >/dev/console 2>&1 &
fi
[ -z "$shell" ] || sh </dev/ttyS0 >/dev/ttyS0 2>&1 &
exec guest-probe "$redis"
