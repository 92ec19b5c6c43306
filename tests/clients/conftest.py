"""What has to be said before the clients are imported."""

import os

# Else LiteLLM asks the internet for prices, at import and again later.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
