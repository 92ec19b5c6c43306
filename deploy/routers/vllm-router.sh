#!/bin/sh
# vllm-router.sh PORT URL...  vllm-router before the servers at URL...: for clients' own keys, which it passes on.
# HOST is the address to listen on.  Whatever follows the URLs and begins with -- goes to vllm-router as it is.
port=${1:?vllm-router.sh PORT URL...}
shift
set -- --worker-urls "$@"
# By a tree of the prompts' tokens, for which it asks the servers.
set -- --policy cache_aware "$@"
set -- --health-check-endpoint /ready "$@"
# A server that is gone is left out after two failures, not ten, and asked again after 5 seconds, not 60.
set -- --cb-failure-threshold 2 --cb-success-threshold 1 --cb-timeout-duration-secs 5 "$@"
set -- --health-check-interval-secs 2 --health-check-timeout-secs 2 "$@"
set -- --health-failure-threshold 2 --health-success-threshold 1 "$@"
set -- --worker-startup-check-interval 1 "$@"
set -- --host "${HOST:-127.0.0.1}" "$@"
exec vllm-router --port "$port" "$@"
