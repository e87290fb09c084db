#!/bin/sh
# The guest's first program: from the initramfs to the host's files, read-only under a writable layer.
b=/bin/busybox
$b mkdir -p /proc /sys /dev /host /extra /up /new
$b mount -t proc p /proc
$b mount -t sysfs s /sys
$b mount -t devtmpfs d /dev
while read -r module; do
    $b insmod "/m/$module" || echo "guest: module $module cannot be loaded"
done < /m/order
share=trans=virtio,version=9p2000.L,msize=512000
$b mount -t 9p -o $share,ro,cache=loose root /host || echo "guest: no root"
$b mount -t 9p -o $share,ro,cache=loose extra /extra || echo "guest: no extra files"
$b mount -t tmpfs -o size=75% t /up
$b mkdir -p /up/u /up/w
$b mount -t overlay -o lowerdir=/extra:/host,upperdir=/up/u,workdir=/up/w o /new || echo "guest: no overlay"
$b mkdir -p /new/job /new/proc /new/sys /new/dev /new/run
$b mount -t 9p -o $share,cache=none job /new/job || echo "guest: no job"
for dir in proc sys dev; do $b mount -o move /$dir /new/$dir; done
$b mount -t tmpfs t /new/run
exec $b switch_root /new /bin/bash /job/guest.sh
