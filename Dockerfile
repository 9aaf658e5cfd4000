# A server in an image: `docker build -t openinfer .` for a CPU, with `--build-arg EXTRAS=gpu,fast,hub` for an NVIDIA GPU.
#     docker run -p 8000:8000 openinfer                                             # the small demo model
#     docker run -p 8000:8000 --gpus all -v ./Qwen3-4B:/model openinfer serve /model --host 0.0.0.0
# The host brings the driver (580 or newer) and NVIDIA's container toolkit.
FROM python:3.11-slim
ARG EXTRAS=fast,hub
WORKDIR /app
COPY constraints.txt pyproject.toml README.md CHANGELOG.md LICENSE ./
COPY src src
COPY libs libs
COPY recipes recipes
COPY demo demo
RUN pip install --no-cache-dir -c constraints.txt ./libs/tensor ./libs/kernels ./libs/graph ./libs/kvpool \
    ./libs/sampler ./libs/scheduler ./libs/frontend ./recipes ".[$EXTRAS]"
RUN useradd --create-home openinfer && mkdir /cache && chown openinfer /cache
USER openinfer
# Compiled kernels and checkpoints of the hub outlive the container here.
ENV OPENINFER_CACHE=/cache/openinfer HF_HOME=/cache/huggingface
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=300s CMD \
    ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["openinfer"]
CMD ["serve", "demo/qwen3", "--host", "0.0.0.0"]
