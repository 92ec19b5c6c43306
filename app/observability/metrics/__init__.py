"""What an operator can watch: counts, gauges and distributions, for Prometheus to collect.

Names that begin with `vllm:` mean what they mean at vLLM, so that dashboards and balancers made for
it work here; `mlx_server:` is what only this server has.
"""
