# An image that serves an export. Run in the repository root:
#   docker build --file deploy/serve.Dockerfile --tag lockstep-serve .
#   docker run --rm --publish 8000:8000 --volume "$PWD/runs/NAME/export:/model:ro" lockstep-serve
# To include the export in the image: FROM lockstep-serve, then COPY export /model
# Installs the CPU build of torch, which is much smaller. GPU build: --build-arg TORCH_INDEX=https://pypi.org/simple
ARG BASE=python:3.11-slim
FROM ${BASE}

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG VERSION=0.1.0

LABEL org.opencontainers.image.title="lockstep-serve" \
      org.opencontainers.image.description="An HTTP server for a model that Lockstep has exported" \
      org.opencontainers.image.version="${VERSION}"

# an export contains everything that its model needs, so access to the hub is disabled
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    HF_HUB_OFFLINE=1

RUN groupadd --gid 1000 lockstep \
    && useradd --uid 1000 --gid 1000 --create-home --shell /usr/sbin/nologin lockstep

WORKDIR /opt/lockstep

# layers that rarely change come first; torch is installed alone and pinned, so that nothing else selects another build
COPY constraints.txt ./
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" --extra-index-url https://pypi.org/simple \
    --constraint constraints.txt torch \
    && find /usr/local/lib \( -path '*/torch/bin/*' ! -name torch_shm_manager -o -path '*/torch/include' -o -path '*/torch/test' \
    -o -path '*/site-packages/*/tests' \) -prune -exec rm --recursive {} +

# then the other dependencies, including the server's packages and onnxruntime, without those that only training reads
COPY pyproject.toml ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *p['optional-dependencies']['serve'], 'onnxruntime', sep='\n')" \
    > needed.txt \
    && grep -Ev '^(matplotlib|nvidia-ml-py|pooch|pyarrow|scikit-learn|tensorboard|torchmetrics)\b' needed.txt > requirements.txt \
    && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt \
    && find /usr/local/lib -path '*/site-packages/*/tests' -prune -exec rm --recursive {} +

# the source code changes most often, so it comes last; .dockerignore says what is copied
COPY . .
RUN pip install --no-cache-dir --no-deps . && rm --recursive --force build

USER 1000:1000
WORKDIR /home/lockstep
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["lockstep"]
CMD ["serve", "/model", "--host", "0.0.0.0", "--port", "8000"]
