#!/bin/sh
# smg.sh PORT URL...  smg before the servers at URL...: the default.  docs/replicas.md compares it with the others.
# HOST is the address to listen on, SMG_API_KEY the key of clients and servers.  Flags behind the URLs go to smg as they are, and outrank those below.
port=${1:?smg.sh PORT URL...}
shift
set -- --worker-urls "$@"
# To the server whose prefix cache has most of the prompt, unless others have much less to do.
set -- --policy cache_aware "$@"
# /ready and not /health: a server that drains is alive, but takes no new requests.
set -- --health-check-endpoint /ready "$@"
# Seconds, so that a server that is back is found again within three.
set -- --health-check-interval-secs 1 --health-check-timeout-secs 2 "$@"
# Its breaker would leave out for a minute a server that is back.  Instead a request waits until a check has found out.
set -- --disable-circuit-breaker --retry-initial-backoff-ms 400 "$@"
set -- --health-failure-threshold 2 --health-success-threshold 1 "$@"
# A server that is not there yet is asked again after 2 seconds, not 30.
set -- --worker-startup-check-interval 2 "$@"
# Requests with the same X-Session-Id go to one server, as previous_response_id needs it.
set -- --sticky-sessions --routing-key-headers x-session-id "$@"
# The servers write comments to silent streams: its own would hide one that stands still.
set -- --sse-keepalive-secs 0 "$@"
# By itself it listens on all addresses, with its metrics, too.
set -- --host "${HOST:-127.0.0.1}" --prometheus-host 127.0.0.1 "$@"
set -- launch --port "$port" "$@"
[ -n "${SMG_API_KEY:-}" ] || exec smg "$@"
# It takes a key as an argument only, which all users of a machine can read until it has started.
exec "$(dirname "$(readlink -f "$(command -v smg)")")/python" -c '
import os, sys
from smg.cli import main
main([*sys.argv[1:], "--api-key", os.environ["SMG_API_KEY"]])' "$@"
