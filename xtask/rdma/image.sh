# image.sh DIR: makes in DIR what the virtual machine of `cargo xtask test-rdma` boots.
#   vmlinuz, initramfs.gz: a distribution kernel and the modules that it needs until it sees the host's files
#   extra/: files that lie over the host's root in the guest: modules, RDMA programs, UCX with verbs
# Needs apt-get (download only, no root), dpkg-deb, cpio, gzip.
set -eu
dir=$1
rm -rf "$dir"/debs "$dir"/kernel "$dir"/extra "$dir"/ird
mkdir -p "$dir"/debs "$dir"/kernel "$dir"/extra "$dir"/ird/bin "$dir"/ird/m
cd "$dir/debs"
# The kernels for cloud machines lack rdma_rxe.
kernel=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: //p' | head -1)
[ -n "$kernel" ] || { echo "no package linux-image-amd64 is known: run apt-get update" >&2; exit 1; }
apt-get download -qq "$kernel" kmod busybox-static rdma-core ibverbs-utils ibverbs-providers libibverbs1 \
    librdmacm1 libnl-3-200 libnl-route-3-200 iproute2 libucx0 ucx-utils
for deb in *.deb; do
    case $deb in
        linux-image*) dpkg-deb -x "$deb" "$dir/kernel" ;;
        *) dpkg-deb -x "$deb" "$dir/extra" ;;
    esac
done
cd "$dir"
# Where /lib is a link to /usr/lib, a folder of that name would hide the link.
for top in lib bin sbin; do
    [ -d "extra/$top" ] || continue
    mkdir -p "extra/usr/$top"
    cp -a "extra/$top/." "extra/usr/$top/"
    rm -rf "extra/$top"
done
version=$(ls kernel/lib/modules)
mkdir -p tools
ln -sf ../extra/usr/bin/kmod tools/depmod
ln -sf ../extra/usr/bin/kmod tools/modprobe
tools/depmod -b kernel "$version"
mv "kernel/boot/vmlinuz-$version" vmlinuz
: > ird/m/order
for module in virtio_pci virtio_console 9pnet_virtio 9p overlay veth crc32_generic crc32_pclmul ib_uverbs rdma_ucm rdma_rxe; do
    tools/modprobe -d kernel -S "$version" --show-depends "$module" | while read -r _ file _; do
        file=kernel/lib/modules/${file##*/lib/modules/}
        name=$(basename "$file")
        [ -e "ird/m/$name" ] && continue
        cp "$file" "ird/m/$name"
        echo "$name" >> ird/m/order
    done
done
for busybox in extra/bin/busybox extra/usr/bin/busybox; do
    [ -e "$busybox" ] && cp "$busybox" ird/bin/busybox
done
ln -s busybox ird/bin/sh
cp "$dir/init.sh" ird/init
chmod +x ird/init
(cd ird && find . | cpio -o -H newc --quiet | gzip -1) > initramfs.gz
rm -rf debs kernel ird tools
