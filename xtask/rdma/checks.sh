# What `cargo xtask test-rdma` runs in the machine. It is slow: limits are for what hangs, nothing is asserted on time.
export UCX_TLS=rc_verbs,ud_verbs,self UCX_SOCKADDR_TLS_PRIORITY=rdmacm
# UCX 1.13 takes the packets of Soft-RoCE for strangers' otherwise.
export UCX_UD_VERBS_ETH_DGID_CHECK=n UCX_WARN_UNUSED_ENV_VARS=n
failed=0
check() {
    local name=$1
    shift
    echo "== $name"
    timeout -k 5 240 "$@"
    local status=$?
    [ $status = 0 ] || { echo "FAILED ($status): $name"; failed=1; }
}

# Two processes, a device each, packets on the wire between them.
chains() {
    # A client that is bound to no address finds the way to the other device only if it may use both.
    local -x UCX_NET_DEVICES=rxe0:1,rxe1:1,eth0,eth1
    "$CXRMA" owner --ip 10.99.0.2 --transport ucx > /tmp/owner 2>&1 &
    local owner=$!
    until grep -q -- --url /tmp/owner; do
        kill -0 $owner 2> /dev/null || { cat /tmp/owner; return 1; }
        sleep 0.2
    done
    local words
    eval "words=($(grep -o -m1 -- '--url.*' /tmp/owner))"
    check "cxrma: a chain's flag comes after its data" \
        "$CXRMA" reader "${words[@]}" --ip 10.99.0.1 --transport ucx --verify-chain --seconds 3
    kill $owner
    wait $owner 2> /dev/null
}

chains
export CONNEX_RS_TEST_TLS=$UCX_TLS CONNEX_RS_TEST_IP=10.99.0.1 UCX_NET_DEVICES=rxe0:1,eth0
check "integrity and region checks" "$INTEGRITY" ucx --test-threads 1
# Before 1.14 UCX does not tell which transports a connection has, and the engine then asks the owner.
VERSION=$(ucx_info -v | grep -o -m1 'ersion:\? [0-9.]*' | grep -o '[0-9.]*$')
case $VERSION in
    1.13*) echo "== a stopped owner: not with UCX $VERSION, by which the engine makes no one-sided transfers" ;;
    *) check "a stopped owner is read all the same" "$RDMA" --include-ignored --test-threads 1 ;;
esac
exit $failed
