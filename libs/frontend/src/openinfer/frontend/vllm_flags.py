"""Flags of vLLM that openinfer does not have, each with what to do instead."""

_BY_ADVICE: dict[str, str] = {
    "leave it out": "--additional-config",
    "each engine's log lines stand alone; leave it out": "--aggregate-engine-logging",
    "ranks find out how to exchange by themselves; leave it out": (
        "--all2all-backend --cpu-distributed-timeout-seconds --dbo-decode-token-threshold "
        "--dbo-prefill-token-threshold --disable-custom-all-reduce --distributed-timeout-seconds "
        "--enable-dbo"
    ),
    "models of text only are served; leave it out": (
        "--allowed-local-media-path --allowed-media-domains --default-mm-loras --disable-chunked-mm-input "
        "--disable-mm-preprocessor-cache --ec-transfer-config --enable-multimodal-encoder-data-parallel "
        "--interleave-mm-strings --language-model-only --limit-mm-per-prompt --media-io-kwargs "
        "--mm-encoder-tp-mode --mm-processor-cache-gb --mm-processor-cache-type --mm-processor-kwargs "
        "--skip-mm-profiling --video-pruning-rate"
    ),
    "use --frontends N": "--api-server-count --renderer-num-workers",
    "it is always on; leave it out": "--async-scheduling --enable-chunked-prefill --use-v2-block-manager",
    "kernels are chosen by shape; `openinfer tune MODEL` measures them. Leave it out": (
        "--attention-backend --attention-config --disable-cascade-attn --kernel-config --linear-backend "
        "--moe-backend"
    ),
    "an FP8 cache has a scale for each head of each token; leave it out": "--calculate-kv-scales",
    "it is found out from the template; leave it out": "--chat-template-content-format",
    "the checkpoint's files decide; leave it out": (
        "--code-revision --config-format --hf-config-path --ignore-patterns --tokenizer-mode"
    ),
    "use --trace FILE": "--collect-detailed-traces --enable-layerwise-nvtx-tracing --profiler-config",
    "kernels are compiled and recorded before serving; leave it out, or give --enforce-eager": (
        "--compilation-config --cuda-graph-sizes --cudagraph-capture-sizes --max-cudagraph-capture-size "
        "--max-seq-len-to-capture --optimization-level --performance-mode -O -cc"
    ),
    "models generate; leave it out": (
        "--convert --io-processor-plugin --override-pooler-config --pooler-config --runner --task"
    ),
    "weights stay on the GPU; leave it out": "--cpu-offload-gb --offload-backend",
    "/metrics always has what there is; leave it out": (
        "--cudagraph-metrics --enable-mfu-metrics --kv-cache-metrics --show-hidden-metrics-for-version"
    ),
    "use --data-parallel-size N on one host, and a router over several servers": (
        "--data-parallel-address --data-parallel-backend --data-parallel-external-lb "
        "--data-parallel-hybrid-lb --data-parallel-rank --data-parallel-rpc-port --data-parallel-size-local "
        "--data-parallel-start-rank --headless"
    ),
    "GPUs share a model by --tensor-parallel-size; leave it out": (
        "--decode-context-parallel-size --distributed-executor-backend --pipeline-parallel-size "
        "--prefill-context-parallel-size -pp"
    ),
    "use --no-access-log, and --log-requests for what was generated": "--disable-access-log-for-endpoints",
    "the document is at /openapi.json only; leave it out": "--disable-fastapi-docs",
    "use --driver thread": "--disable-frontend-multiprocessing",
    "each kind of layer always has pages of its own; leave it out": "--disable-hybrid-kv-cache-manager",
    "requests are logged with --log-requests only; leave it out": "--disable-log-requests",
    "figures are at /metrics only; leave it out": "--disable-log-stats",
    "windows stay as the model has them; leave it out": "--disable-sliding-window",
    "set HF_HOME in the environment": "--download-dir",
    "experts stay on their ranks; leave it out": "--enable-eplb --eplb-config --expert-placement-strategy",
    "each rank of --tensor-parallel-size always has whole experts; leave it out": "--enable-expert-parallel",
    "use `openinfer tune MODEL`": "--enable-flashinfer-autotune",
    'ask for it by "stream_options": {"include_usage": true}': "--enable-force-include-usage",
    "use --log-requests": "--enable-log-deltas --enable-log-outputs --enable-log-requests",
    "adapters have no bias; leave it out": "--enable-lora-bias",
    "the document is at /openapi.json; leave it out": "--enable-offline-docs",
    "answers have usage, and /metrics the times; leave it out": "--enable-per-request-metrics",
    "a prompt is text or token ids; leave it out": "--enable-prompt-embeds",
    "usage always has prompt_tokens_details; leave it out": "--enable-prompt-tokens-details",
    "use --reasoning-parser": "--enable-reasoning",
    "answers always have X-Request-Id; leave it out": "--enable-request-id-headers",
    "no answer has the experts of a token; leave it out": "--enable-return-routed-experts",
    "/load is always there; leave it out": "--enable-server-load-tracking",
    "start the server again for a new certificate": "--enable-ssl-refresh",
    "/tokenizer_info is always there; leave it out": "--enable-tokenizer-info-endpoint",
    "such requests never have tools in the prompt; leave it out": "--exclude-tools-when-tool-choice-none",
    "system_fingerprint names the version; leave it out": "--fingerprint-mode --fingerprint-value",
    "adapters are divided as their model is; leave it out": "--fully-sharded-loras",
    "grammars are always llguidance's; leave it out": "--guided-decoding-backend --structured-outputs-config",
    "headers have fixed limits; put a proxy in front of the server": (
        "--h11-max-header-count --h11-max-incomplete-event-size"
    ),
    "change a copy of config.json": "--hf-overrides",
    "set HF_TOKEN in the environment": "--hf-token",
    "use --kv-offload-gb and --kv-offload-dir": "--kv-offloading-backend",
    "use --kv-offload-gb": "--kv-offloading-size",
    "no model here shares layers of its cache; leave it out": "--kv-sharing-fast-prefill",
    "use --log-level and --log-format json": "--log-config-file",
    "use --log-level debug": "--log-error-stack",
    "use the sampling fields of a request": "--logits-processors",
    "log-probabilities are those before penalties and temperature; leave it out": "--logprobs-mode",
    "use --max-num-batched-tokens": "--long-prefill-token-threshold",
    "adapters have the dtype of the model; leave it out": "--lora-dtype",
    "adapters add no tokens; leave it out": "--lora-extra-vocab-size",
    "the recipe decides about states; see --snapshot-interval": (
        "--mamba-block-size --mamba-cache-dtype --mamba-cache-mode --mamba-ssm-cache-dtype"
    ),
    "the GPUs of one host share a model by --tensor-parallel-size": (
        "--master-addr --master-port --nnodes --node-rank"
    ),
    "adapters that are loaded always stay in host memory; leave it out": "--max-cpu-loras",
    "prompts are never logged; leave it out": "--max-log-len",
    "20 are possible; leave it out": "--max-logprobs",
    "use --scheduling-policy": (
        "--max-long-partial-prefills --max-num-partial-prefills --scheduler-reserve-full-isl"
    ),
    "one process loads the weights; leave it out": "--max-parallel-loading-workers",
    "put a proxy in front of the server": "--middleware --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers",
    "give the checkpoint without a flag: openinfer serve MODEL": "--model",
    "the checkpoint's model_type chooses a recipe; leave it out": "--model-impl",
    "weights are always read by one way; leave it out": (
        "--model-loader-extra-config --pt-load-map-location --safetensors-load-strategy"
    ),
    "use --kv-cache-memory-bytes": "--num-gpu-blocks-override",
    "use --speculative-config": (
        "--num-speculative-tokens --spec-method --spec-model --spec-tokens --speculative-model"
    ),
    "start the server under numactl": "--numa-bind",
    "set OTEL_EXPORTER_OTLP_HEADERS in the environment": "--otlp-traces-headers",
    "use --generation-config none, and fields of the request": "--override-generation-config",
    "blocks are always named by SHA-256; leave it out": "--prefix-caching-hash-algo",
    "the checkpoint's own format is taken; leave it out": "--quantization-config -q",
    "give thinking_token_budget in the request": "--reasoning-config",
    "answers have the role assistant; leave it out": "--response-role",
    "give return_tokens_as_token_ids in the request": "--return-tokens-as-token-ids",
    "let the proxy strip the path": "--root-path",
    "write rope_scaling into a copy of config.json": "--rope-scaling",
    "write rope_theta into a copy of config.json": "--rope-theta",
    "use --scheduling-policy MODULE:FUNCTION": "--scheduler-cls",
    "give seed in the request": "--seed",
    "a slow reader gets several tokens in an event; leave it out": "--stream-interval",
    "preempted requests are computed again; leave it out": "--swap-space",
    "put the tokenizer's files into the checkpoint's folder": "--tokenizer",
    "--revision holds for all files": "--tokenizer-revision",
    "use --skip-tokenizer-init": "--tokens-only",
    "use --tool-call-parser": "--tool-parser-plugin",
    "calls go to the client, which runs the tools": "--tool-server",
    "no code of a checkpoint is run; leave it out": "--trust-remote-code",
    "give the template by --chat-template": "--trust-request-chat-template",
    "use --host and --port, behind a proxy that listens on the socket": "--uds",
    "progress is always shown; leave it out": "--use-tqdm-on-load",
    "use --log-level": "--uvicorn-log-level",
    "use /update_weights": "--weight-transfer-config",
    "no process has another's class; leave it out": "--worker-cls --worker-extension-cls",
}
"""Advice -> the flags that it is about."""

VLLM_FLAGS = {flag: advice for advice, flags in _BY_ADVICE.items() for flag in flags.split()}
"""Advice about flags of vLLM, by the flag's name without `--no-` and without what follows a dot."""
