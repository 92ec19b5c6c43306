#!/bin/sh
# vllm-router.sh PORT URL...  vllm-router before the servers at URL...; docs/replicas.md compares it with the others.
# HOST is the address to listen on.  Flags behind the URLs go to vllm-router as they are, and outrank those below.
# KV_EVENT_MODEL, the model's name, lets it route by what the servers say of their caches: their MLX_SERVER_KV_EVENTS are
# at the port of each URL + 1000, and MLX_SERVER_KV_EVENTS_REPLAY at + 2000.
port=${1:?vllm-router.sh PORT URL...}
shift
set -- --worker-urls "$@"
if [ -n "${KV_EVENT_MODEL:-}" ]; then
  for url in "$@"; do
    case $url in http://*) ;; *) continue ;; esac
    host=${url#http://}
    host=${host%:*}
    at=${url##*:}
    set -- --kv-event-source "$url=tcp://$host:$((at + 1000))" \
      --kv-event-replay-source "$url=tcp://$host:$((at + 2000))" "$@"
  done
  set -- --policy kv_aware --kv-event-model "$KV_EVENT_MODEL" --kv-event-block-size 32 "$@"
  # Requests with the same X-Session-Id go to one server, as previous_response_id needs it.
  set -- --kv-aware-session-affinity-ttl-secs 3600 "$@"
else
  # By the beginnings of the prompts that it has sent to each.
  set -- --policy cache_aware "$@"
fi
set -- --health-check-endpoint /ready "$@"
# Its breaker counts whatever a server answers with a status from 500 on, a queue that is full and a client's own time
# limit, too: a few of these would leave out all servers.  Instead a request waits until a check has found out.
set -- --disable-circuit-breaker --retry-initial-backoff-ms 400 "$@"
set -- --health-check-interval-secs 1 --health-check-timeout-secs 2 "$@"
set -- --health-failure-threshold 2 --health-success-threshold 1 "$@"
# Servers that are not there yet are asked again after a second, not 30.
set -- --worker-startup-check-interval 1 "$@"
# By itself it lets the pages of all sites call it, and read the answers.
set -- --cors-allowed-origins http://localhost "$@"
set -- --host "${HOST:-127.0.0.1}" "$@"
exec vllm-router --port "$port" "$@"
