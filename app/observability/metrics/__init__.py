"""Counters, gauges and histograms for Prometheus.

Metrics named `vllm:` mean the same as in vLLM, so that dashboards and load balancers made for it work
here; metrics named `mlx_server:` exist in this server only.
"""
