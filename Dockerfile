# A server in an image: `docker build -t openinfer .` for a CPU, with `--build-arg EXTRAS=gpu,fast,hub` for an NVIDIA GPU.
#     docker run -p 127.0.0.1:8000:8000 openinfer               # the small demo model, for this machine alone
#     docker run -p 127.0.0.1:8000:8000 --gpus all -v ./Qwen3-4B:/model openinfer serve /model --host 0.0.0.0
# The host brings the driver (580 or newer) and NVIDIA's container toolkit. docs/deployment.md has the layers and their sizes.
FROM python:3.11-slim AS made
ARG EXTRAS=fast,hub
WORKDIR /app
COPY constraints.txt pyproject.toml README.md CHANGELOG.md LICENSE ./
COPY src src
COPY libs libs
COPY recipes recipes
COPY examples/llama examples/llama
RUN pip install -q --no-cache-dir --no-deps --prefix /made ./libs/tensor ./libs/kernels ./libs/graph ./libs/kvpool \
    ./libs/sampler ./libs/scheduler ./libs/frontend ./recipes ./examples/llama .
RUN pip install -q --no-cache-dir --dry-run --ignore-installed --report /report.json -c constraints.txt ./libs/tensor \
    ./libs/kernels ./libs/graph ./libs/kvpool ./libs/sampler ./libs/scheduler ./libs/frontend ./recipes ".[$EXTRAS]"
RUN ["python", "-c", "import json; found = [one['metadata'] for one in json.load(open('/report.json'))['install']]; \
    open('/others.txt', 'w').writelines(sorted('%(name)s==%(version)s\\n' % one for one in found if 'openinfer' not in one['name']))"]

FROM python:3.11-slim
WORKDIR /app
# What others made changes with its versions, what we made with every commit: so they are layers of their own.
COPY --from=made /others.txt ./
RUN pip install --no-cache-dir -r others.txt
RUN useradd --create-home openinfer && mkdir /cache && chown openinfer /cache
COPY demo demo
COPY --from=made /made /usr/local
USER openinfer
# Compiled kernels and checkpoints of the hub outlive the container here.
ENV OPENINFER_CACHE=/cache/openinfer HF_HOME=/cache/huggingface
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=300s CMD \
    ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["openinfer"]
CMD ["serve", "demo/qwen3", "--host", "0.0.0.0"]
