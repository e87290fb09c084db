# suite.sh DIR SUITE: makes in DIR/root a root of its own for the virtual machine of `cargo xtask test-rdma --suite SUITE`:
# the packages of that suite which the checks need and what they depend on, unpacked. It is never started but there.
# Needs apt-get (download only, no root), dpkg-deb, tar, ldconfig.
set -eu
dir=$1
suite=$2
# The archive is the one from which this system has its own packages.
release=$(. /etc/os-release && echo "$VERSION_CODENAME")
archive=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' "Codename: $release" 'Component: main' | head -1)
[ -n "$archive" ] || { echo "apt knows no archive of $release: run apt-get update" >&2; exit 1; }
rm -rf "$dir"/apt "$dir"/root
mkdir -p "$dir"/apt/lists/partial "$dir"/apt/archives/partial "$dir"/root/usr
# A state of apt's own, in which nothing is installed: then it downloads all that is needed, and touches nothing of the system.
echo "deb $archive $suite main" > "$dir/apt/sources"
: > "$dir/apt/status"
apt() {
    apt-get -qq -o Dir::Etc::SourceList="$dir/apt/sources" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::Etc::PreferencesParts=/dev/null -o Dir::State="$dir/apt" -o Dir::State::Status="$dir/apt/status" \
        -o Dir::Cache="$dir/apt" -o APT::Sandbox::User= "$@"
}
apt update
apt install -y --no-install-recommends --download-only \
    base-files base-passwd bash coreutils grep sed util-linux mount hostname iproute2 libucx0 ucx-utils rdma-core \
    ibverbs-utils ibverbs-providers
for top in bin sbin lib lib64; do
    mkdir "$dir/root/usr/$top"
    ln -s "usr/$top" "$dir/root/$top"
done
for deb in "$dir"/apt/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$dir/root" --keep-directory-symlink --no-same-owner
done
cp "$dir/root/usr/share/base-passwd/passwd.master" "$dir/root/etc/passwd"
cp "$dir/root/usr/share/base-passwd/group.master" "$dir/root/etc/group"
ldconfig -r "$dir/root"
rm -rf "$dir/apt"
