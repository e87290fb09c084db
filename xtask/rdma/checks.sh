# What `cargo xtask test-rdma` runs in the machine. It is slow: limits are for what hangs, nothing is asserted on time.
export UCX_TLS=rc_verbs,ud_verbs,self UCX_SOCKADDR_TLS_PRIORITY=rdmacm
# UCX 1.13 takes the packets of Soft-RoCE for strangers' otherwise.
export UCX_UD_VERBS_ETH_DGID_CHECK=n UCX_WARN_UNUSED_ENV_VARS=n
failed=0
check() {
    local name=$1
    shift
    echo "== $name"
    timeout -k 5 300 "$@"
    local status=$?
    [ $status = 0 ] || { echo "FAILED ($status): $name"; failed=1; }
}
# A connect may take longer here than the 3 s that an engine waits. As its user would, starts the program again then, and only then.
patiently() {
    local try status
    for try in 1 2 3 4 5; do
        "$@" 2>&1 | tee /tmp/said
        status=${PIPESTATUS[0]}
        [ "$status" != 0 ] && grep -q 'connect timeout' /tmp/said || return "$status"
    done
    return "$status"
}
export -f patiently

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
        bash -c 'patiently "$@"' - "$CXRMA" reader "${words[@]}" --ip 10.99.0.1 --transport ucx --verify-chain --seconds 3
    kill $owner
    wait $owner 2> /dev/null
}

chains
export CONNEX_RS_TEST_TLS=$UCX_TLS CONNEX_RS_TEST_IP=10.99.0.1 UCX_NET_DEVICES=rxe0:1,eth0
check "integrity and region checks" "$INTEGRITY" ucx --test-threads 1
check "what the surface promises: refusals, signals, chains" "$SURFACE" --test-threads 1 \
    ucx::wrong_addresses ucx::access_is ucx::the_local_side ucx::registration ucx::a_signal ucx::a_chain
check "failure and rejoin" "$REJOIN" --test-threads 1 ucx::a_newcomer ucx::a_message ucx::the_older
check "one-sided access, deaths, settings" "$RDMA" --include-ignored --test-threads 1
exit $failed
