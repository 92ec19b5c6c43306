"""An evaluation that anyone can repeat: lm-evaluation-harness over HTTP and on plain mlx-lm."""
