#!/bin/bash
# Process 1 of the guest: two Soft-RoCE devices whose packets cross a wire, then the job, then off.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mkdir -p /dev/pts /dev/shm
mount -t devpts d /dev/pts
mount -t tmpfs s /dev/shm
# The project's files, where the root is not the system's own.
while read -r tag path; do
    mkdir -p "$path"
    mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,ro,cache=loose "$tag" "$path"
done < /job/shares
ulimit -l unlimited
ulimit -n 65536
hostname rdma
# The MTU holds an RDMA packet of 4096 bytes with its heads.
ip -batch - <<B
link set lo up
link add eth0 mtu 4200 type veth peer name eth1 mtu 4200
addr add 10.99.0.1/24 dev eth0
addr add 10.99.0.2/24 dev eth1
link set eth0 up
link set eth1 up
B
rdma link add rxe0 type rxe netdev eth0
rdma link add rxe1 type rxe netdev eth1
# Both addresses are this machine's, so the kernel would keep their packets off the wire: what comes in is looked up as
# local first, what goes out to the other address leaves by its interface.
for where in all eth0 eth1; do
    echo 0 > /proc/sys/net/ipv4/conf/$where/rp_filter
    echo 1 > /proc/sys/net/ipv4/conf/$where/accept_local
done
ip -batch - <<B
route add 10.99.0.2 dev eth0 src 10.99.0.1 table 100
route add 10.99.0.1 dev eth1 src 10.99.0.2 table 101
rule add pref 5 iif eth0 lookup local
rule add pref 6 iif eth1 lookup local
rule add pref 10 oif eth0 to 10.99.0.2 lookup 100
rule add pref 11 oif eth1 to 10.99.0.1 lookup 101
rule add pref 12 from 10.99.0.1 to 10.99.0.2 lookup 100
rule add pref 13 from 10.99.0.2 to 10.99.0.1 lookup 101
rule add pref 100 lookup local
rule del pref 0
B
console=$(ls /dev/vport*p1 | head -1)
( setsid bash /job/command ) < /dev/null > "$console" 2>&1
echo $? > /job/status
sync
echo b > /proc/sysrq-trigger
sleep 5
