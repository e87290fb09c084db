# What `cargo xtask test-rdma` runs in the machine. It is slow: limits are for what hangs, nothing is asserted on time.
export UCX_TLS=rc_verbs,ud_verbs,self UCX_SOCKADDR_TLS_PRIORITY=rdmacm
# UCX 1.13 takes the packets of Soft-RoCE for strangers' otherwise.
export UCX_UD_VERBS_ETH_DGID_CHECK=n UCX_WARN_UNUSED_ENV_VARS=n
ls "$CONNEX_RS_UCX"/ucx/libuct_ib.so* > /dev/null 2>&1 || {
    echo "the UCX in $CONNEX_RS_UCX is built without verbs: there is nothing to check over RDMA. Use another --suite, or --ucx"
    exit 1
}
failed=0
check() {
    local name=$1
    shift
    echo "== $name"
    if [ "$(type -t "$1")" = function ]; then "$@"; else timeout -k 5 300 "$@"; fi
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

# Two processes. Says whether a chain's flag was posted behind its data ("true") or after it was in place ("false").
chains() {
    local devices=$1 owner_ip=$2 follows=$3
    local -x UCX_NET_DEVICES=$devices NO_COLOR=1
    "$CXRMA" owner --ip "$owner_ip" --transport ucx > /tmp/owner 2>&1 &
    local owner=$!
    until grep -q -- --url /tmp/owner; do
        kill -0 $owner 2> /dev/null || { cat /tmp/owner; return 1; }
        sleep 0.2
    done
    local words
    eval "words=($(grep -o -m1 -- '--url.*' /tmp/owner))"
    in_order() {
        local -x CONNEX_RS_LOG=warn,connex_rs::transport=trace
        patiently timeout -k 5 300 "$CXRMA" reader "${words[@]}" --ip 10.99.0.1 --transport ucx --verify-chain --seconds 3 > /tmp/chains
        local status=$?
        grep -v 'a fence between puts' /tmp/chains
        local behind after
        behind=$(grep -c 'fence between puts.*follows=true' /tmp/chains)
        after=$(grep -c 'fence between puts.*follows=false' /tmp/chains)
        echo "flags posted behind their data: $behind, after it: $after"
        [ $status = 0 ] || return $status
        if [ "$follows" = true ]; then [ "$behind" -gt 0 ]; else [ "$behind" = 0 ] && [ "$after" -gt 0 ]; fi
    }
    check "cxrma: a chain's flag comes after its data ($devices)" in_order
    kill $owner
    wait $owner 2> /dev/null
}

# A device each, packets on the wire between them. A client that is bound to no address finds the way to the other device only if
# it may use both, and then has two lanes.
chains rxe0:1,rxe1:1,eth0,eth1 10.99.0.2 false
# One lane, which keeps the order.
chains rxe0:1,eth0 10.99.0.1 true
export CONNEX_RS_TEST_TLS=$UCX_TLS CONNEX_RS_TEST_IP=10.99.0.1 UCX_NET_DEVICES=rxe0:1,eth0
check "integrity and region checks" "$INTEGRITY" ucx --test-threads 1
check "what the surface promises: refusals, signals, chains" "$SURFACE" --test-threads 1 \
    ucx::wrong_addresses ucx::access_is ucx::the_local_side ucx::registration ucx::a_signal ucx::a_chain
check "failure and rejoin" "$REJOIN" --test-threads 1 ucx::a_newcomer ucx::a_message ucx::the_older
check "one-sided access, deaths, settings" "$RDMA" --include-ignored --test-threads 1
exit $failed
