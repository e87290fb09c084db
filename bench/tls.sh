#!/bin/sh
# Reads and writes over the built-in transport on loopback, plain and with TLS in turn: what encryption costs.
#
#     cargo build --release -p cxrma && sh bench/tls.sh [ROUNDS]
#
# Wants openssl and Python. Prints medians in microseconds, one line for each round and way.
set -eu

program=$(cd "$(dirname "$0")/.." && pwd)/target/release/cxrma
rounds=${1:-3}
dir=$(mktemp -d)
owner=
trap '[ -z "$owner" ] || kill "$owner"; rm -rf "$dir"' EXIT

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=bench-ca \
    -keyout "$dir/ca.key" -out "$dir/ca.pem" 2>"$dir/log"

# certificate NAME MODEL REPLICA
certificate() {
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$1" \
        -keyout "$dir/$1.key" -out "$dir/$1.csr" 2>>"$dir/log"
    echo "subjectAltName=URI:connex-rs:$2%7C0%7C0%7C$3" >"$dir/$1.ext"
    openssl x509 -req -in "$dir/$1.csr" -CA "$dir/ca.pem" -CAkey "$dir/ca.key" -CAcreateserial -days 1 \
        -extfile "$dir/$1.ext" -out "$dir/$1.pem" 2>>"$dir/log"
}

# secured NAME: the settings of an engine with that certificate
secured() {
    export CONNEX_RS_TLS_CERT="$dir/$1.pem" CONNEX_RS_TLS_KEY="$dir/$1.key" CONNEX_RS_TLS_CA="$dir/ca.pem"
}

certificate owner cxrma-owner 0
round() {
    way=$1
    (
        [ "$way" = plain ] || secured owner
        exec "$program" owner --ip 127.0.0.1 --transport tcp --large --json >"$dir/offer"
    ) 2>>"$dir/log" &
    owner=$!
    until [ -s "$dir/offer" ]; do
        kill -0 "$owner" || { cat "$dir/log" >&2; exit 1; }
        sleep 0.1
    done
    url=$(sed 's/.*"url":"\([^"]*\)".*/\1/' "$dir/offer")
    addr=$(sed 's/.*"addr":"\{0,1\}\([^",}]*\).*/\1/' "$dir/offer")
    # A reader's replica is its process id.
    (
        reader=$(exec sh -c 'echo "$PPID"')
        [ "$way" = plain ] || { certificate "reader" cxrma-reader "$reader"; secured reader; }
        exec "$program" reader --ip 127.0.0.1 --transport tcp --url "$url" --addr "$addr" --large \
            --sizes 4K,1M,16M --only latency --budget-ms 1000 --json
    ) 2>>"$dir/log" | python3 -c "
import json, sys
rows = json.load(sys.stdin)['results']
print('$way', *(f\"{r['op']} {r['bytes'] >> 10}K {r['p50_us']:.1f}\" for r in rows), sep='  ')"
    kill "$owner"
    wait "$owner" 2>>"$dir/log" || true
    owner=
    rm "$dir/offer"
}
for _ in $(seq "$rounds"); do
    round plain
    round tls
done
