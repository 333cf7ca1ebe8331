# An image for training. Run in the repository root:
#   docker build --file deploy/train.Dockerfile --tag lockstep .
# CPU build of torch, which is much smaller: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG BASE=python:3.11-slim
FROM ${BASE}

ARG TORCH_INDEX=https://pypi.org/simple
ARG VERSION=0.1.0

LABEL org.opencontainers.image.title="lockstep" \
      org.opencontainers.image.description="Distributed PyTorch training from one YAML file" \
      org.opencontainers.image.version="${VERSION}"

# log output is not buffered
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# the default of launch.user
RUN groupadd --gid 1000 lockstep \
    && useradd --uid 1000 --gid 1000 --create-home --shell /usr/sbin/nologin lockstep \
    && install --directory --owner=1000 --group=1000 /workspace

WORKDIR /opt/lockstep

# layers that rarely change come first; torch is installed alone and pinned, so that nothing else selects another build
COPY constraints.txt ./
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" --extra-index-url https://pypi.org/simple \
    --constraint constraints.txt torch \
    && find /usr/local/lib \( -path '*/torch/bin/test_*' -o -path '*/torch/test' \) -prune -exec rm --recursive {} +

# then the other dependencies, including those for data sets from the Hugging Face hub
COPY pyproject.toml ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *p['optional-dependencies']['hub'], sep='\n')" \
    > requirements.txt \
    && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt

# the source code changes most often, so it comes last; .dockerignore says what is copied
COPY . .
RUN pip install --no-cache-dir --no-deps . && rm --recursive --force build

# numeric, so that Kubernetes can verify that it is not root
USER 1000:1000
WORKDIR /workspace
ENTRYPOINT ["lockstep"]
CMD ["--help"]
