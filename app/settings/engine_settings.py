"""The settings of the model and of the engine that serves it."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings


class EngineSettings(BaseSettings):
    """The settings by which a model is loaded and run; `Settings` has the sources and the rules."""

    model: str = Field(
        default="smollm2-135m-instruct",
        description="Model to serve: the bundled one by this name, a `.gguf` file, a model directory, "
        "or a hub id.",
    )
    model_id: str | None = Field(
        default=None,
        description="Name that clients use for the model; empty takes it from `MLX_SERVER_MODEL`.",
    )
    models: str = Field(
        default="",
        description="Further models, separated by commas, which are loaded when a request names them: what "
        "`MLX_SERVER_MODEL` takes, or `name=` in front of it.",
    )
    models_file: Path | None = Field(
        default=None,
        description="TOML file of models, with settings, aliases and more of each; docs/many-models.md describes it. "
        "`MLX_SERVER_MODEL` is served beside them if it is set.",
    )
    models_dir: Path | None = Field(
        default=None,
        description="Folder whose models can be served too, by their names: `.gguf` files, and directories with a "
        "`config.json`.",
    )
    serve_hub_cache: bool = Field(
        default=False,
        description="Let requests name the models that the hub's cache on this machine holds.",
    )
    max_memory_gib: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Most GiB for weights and KV caches of all models. Empty is what is free at the start.",
    )
    idle_unload: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds without a request after which a model is unloaded. Empty is never.",
    )
    min_resident: float = Field(
        default=5.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds for which a model stays loaded before it makes room for another one.",
    )
    load_timeout: float = Field(
        default=600.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that a request waits for its model to be loaded; then it gets a 503.",
    )
    adapters: str = Field(
        default="",
        description="LoRA adapters of `MLX_SERVER_MODEL`, as `name=folder or hub id`, separated by commas; "
        "docs/adapters.md describes them. Those of other models are in `MLX_SERVER_MODELS_FILE`.",
    )
    max_adapters: int = Field(
        default=8,
        ge=1,
        description="Most adapters of a model in the device's memory at once; requests for others wait until one is "
        "in no use. Any number can be served.",
    )
    max_adapter_rank: int = Field(
        default=32,
        ge=1,
        le=512,
        description="Largest rank of an adapter, for which room is kept.",
    )
    allow_runtime_adapters: bool = Field(
        default=False,
        description="Let admins load and unload adapters: `/v1/load_lora_adapter`, `/v1/unload_lora_adapter`.",
    )
    adapter_dirs: str = Field(
        default="",
        description="Folders, separated by commas, in which admins may load adapters; needed for "
        "`MLX_SERVER_ALLOW_RUNTIME_ADAPTERS`.",
    )
    enable_batching: bool = Field(
        default=True,
        description="Serve many requests at once; `false` serves one at a time through the same code.",
    )
    max_num_seqs: int = Field(
        default=8,
        ge=1,
        validate_default=True,
        description="Most requests that share a step of the model.",
    )
    num_blocks: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default=1024,
        description="KV cache blocks of 32 tokens, shared by all requests. Unless this is set, they take "
        "at most half of the free memory. `auto` takes as many as fit in `MLX_SERVER_MEMORY_FRACTION`.",
    )
    max_num_batched_tokens: int = Field(
        default=512,
        ge=1,
        description="Most tokens in one step; at least `MLX_SERVER_MAX_NUM_SEQS`.",
    )
    prefill_chunk: int = Field(
        default=256, ge=1, description="Most prompt tokens of one request in one step."
    )
    max_stall_ms: float = Field(
        default=250.0,
        gt=0,
        allow_inf_nan=False,
        description="Most milliseconds that prefill or an image may add to a step of running streams; less where such a step is short and few prompts wait.",
    )
    max_draft_tokens: int = Field(
        default=7,
        ge=0,
        description="Most tokens drafted for one request in a step by prompt lookup, while few requests run; outputs are unchanged. 0 is off.",
    )
    enable_prefix_cache: bool = Field(
        default=True, description="Reuse the KV cache of prompts with a common prefix."
    )
    async_scheduling: bool = Field(
        default=True,
        description="Plan and queue a step while the one before it runs, where the native kernels run "
        "the model; outputs are unchanged.",
    )
    aging_rate: float = Field(
        default=0.1,
        gt=0,
        allow_inf_nan=False,
        description="Priority classes that a waiting request climbs each second.",
    )
    max_urgent_wait_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["off"] = Field(
        default=500.0,
        description="Milliseconds that a request waits for room before running requests of a lower priority make "
        "way for it; steps without streams take no longer either. With `off` all that run go on to their ends.",
    )
    max_model_len: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Most tokens of one request, prompt and output together; empty takes the model's "
        "context. A number beyond that counts only where the model declares none.",
    )
    max_choices: int = Field(
        default=16, ge=1, le=128, description="Most choices for one prompt (`n`, `best_of`)."
    )
    memory_fraction: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Share of the device's memory for weights and KV cache together, if the number of blocks is `auto`.",
    )
    state_cache_mib: int | None = Field(
        default=None,
        ge=0,
        description="MiB that the prefix cache may keep of recurrent states, of models that have them; "
        "0 keeps none, so that no prefix is found. Without it, an eighth of the free memory.",
    )
    vision_cache_mib: int = Field(
        default=512,
        ge=0,
        description="MiB of encoded images that stay for requests with equal ones, of models that take images.",
    )
    generation_config: Literal["auto", "openai"] = Field(
        default="auto",
        description="Defaults of temperature, top_p, top_k, min_p and repetition_penalty: `auto` takes those "
        "of the model's `generation_config.json` or GGUF file, `openai` always 1, 1, 0, 0 and 1.",
    )
    pooling: Literal["auto", "last", "mean", "cls", "off"] = Field(
        default="auto",
        description="What embeddings are made of: `auto` as the model's `modules.json` or GGUF file says, "
        "and none of a model that says nothing; `last`, `mean` and `cls` (the last token, all, the first) "
        "of any model; `off` makes none.",
    )
    rerank_template: str | None = Field(
        default=None,
        description="Template of a reranker's prompts, of the roles `query`, `document` and for an "
        "instruction `system`: `qwen3`, a file, or the text of a template. Empty takes the model's chat "
        "template if it has these roles, and `qwen3` for a model with `Qwen3-Reranker` in its name.",
    )
    rerank_tokens: str | None = Field(
        default=None,
        description="The two tokens by which a model says that a document is irrelevant, and that it is "
        "relevant, with a comma between them. Empty takes those of the model's files, or with a template "
        "`no,yes`.",
    )
    chat_template: str | None = Field(
        default=None,
        description="Chat template in place of the model's: a file, or the text of a template, which has "
        "`{{` or `{%`.",
    )
    allow_request_chat_template: bool = Field(
        default=False,
        description="Let a request bring a chat template, which is rendered in a process with limits.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of the weights; `auto` keeps them as they are stored, but on a CPU without native kernels it is float32.",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = Field(
        default="auto",
        description="Type of the keys and values in the KV cache; `auto` is that of the model's activations, or bfloat16 with the native kernels in the precision `auto`. `int8` holds nearly four times as many tokens as `float32`, and needs the native kernels, or on a GPU those of its pool.",
    )
    device: Literal["auto", "cpu", "gpu"] = Field(
        default="auto", description="Device to compute on; `auto` is the GPU if there is one."
    )
    native: Literal["auto", "off", "require"] = Field(
        default="auto",
        description="Native CPU kernels: `auto` uses them if they are built; `require` does not start without.",
    )
    cpu_precision: Literal["auto", "exact"] = Field(
        default="auto",
        description="With native kernels: `exact` computes in float32. `auto` rounds the activations that are multiplied with quantized weights to 16 bits, or to 8 for weights of up to 4 bits where the processor has VNNI, and multiplies in bfloat16 where it has AMX; keys and values are bfloat16.",
    )
    cpu_threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Threads of the native kernels, at most one for each hardware thread that the process may use. Empty is one for each core, and from 8 on one fewer unless cores have several hardware threads.",
    )
    weights_cache_dir: Path | None = Field(
        default=None,
        description="Folder for the packed weights of models with more than 256 MiB, with which a second start takes seconds. Empty is the folder `mlx-batch-server` beside the cache of the hub.",
    )
    weights_cache_gib: int = Field(
        default=64,
        ge=0,
        description="Most GiB of packed weights in that folder; those used last stay. 0 keeps and reads none.",
    )
    kv_cache_dir: Path | None = Field(
        default=None,
        description="Folder in which keys and values of prompts and answers outlive the server, evictions and unloads, so that they are read and not computed again. It can be turned back into text: only you can read it. Empty keeps none.",
    )
    kv_cache_gib: float = Field(
        default=32.0,
        gt=0,
        description="Most GiB of that folder, files of others included; those used last stay.",
    )
    kv_cache_max_write_gib_per_day: float | None = Field(
        default=None,
        gt=0,
        description="Most GiB that are written to it in a day, since that wears a disk. Empty is no limit.",
    )
    kv_host_gib: float = Field(
        default=0.0,
        ge=0,
        description="GiB of the host's memory for keys and values of each model, which outlive evictions there. For GPUs with memory of their own; elsewhere a larger pool does more.",
    )
    gpu_kernels: Literal["auto", "off", "require"] = Field(
        default="off",
        description="Kernels that write and read the KV cache of a GPU in place: `auto` uses them if a check at the start finds them right; `require` does not start without. `off` until a report of `make gpu-check` on such a GPU is there.",
    )
    mlx_cache_mib: int = Field(
        default=1024,
        ge=0,
        description="On a GPU: most MiB of freed buffers that MLX keeps to use them again. Without a limit they grow "
        "with every new shape of a step, up to all the memory there is.",
    )
    wired_limit_mib: int | None = Field(
        default=None,
        ge=0,
        description="On a Mac: MiB that stay in memory for the GPU, and are never compressed or swapped. Empty is the "
        "weights and the KV cache; 0 is nothing.",
    )
    ranks: str | None = Field(
        default=None,
        description="File of the hosts that the model is divided among, as `mlx.distributed_config` writes it, or its "
        "text; docs/ranks.md describes it. Empty serves on this machine alone.",
    )
    ranks_backend: Literal["ring", "jaccl", "jaccl-ring", "nccl"] = Field(
        default="ring",
        description="What MLX connects these hosts by: `ring` is TCP, `jaccl` RDMA over Thunderbolt, `nccl` for NVIDIA "
        "GPUs. Without it, what the file says.",
    )
    ranks_host: str | None = Field(
        default=None,
        description="Address of the first of these hosts at which it waits for the others. Empty is its first one in the "
        "file, which in a ring over Thunderbolt only its neighbour reaches.",
    )
    ranks_port: int = Field(
        default=32322,
        ge=1,
        le=65534,
        description="Port on which the first of these hosts waits for the others; MLX listens on those that follow it.",
    )
    ranks_timeout: float = Field(
        default=60.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds within which the processes on these hosts must have found each other.",
    )
