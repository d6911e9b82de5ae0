# syntax=docker/dockerfile:1
# The API (default), and with --target worker a worker that trains on the CPU. From the root of the checkout:
#   docker build -t eft-api .
#   docker build -t eft-worker-cpu --target worker .
# Debian 12's own Python (3.11) is what every test runs on.
ARG BASE=debian:bookworm-20260918-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251

FROM ${BASE} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/eft/venv
COPY locks/s3.txt /opt/eft/locks/
RUN /opt/eft/venv/bin/python -m pip install --no-cache-dir --no-deps --require-hashes -r /opt/eft/locks/s3.txt
COPY client /opt/eft/client
RUN /opt/eft/venv/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation /opt/eft/client

FROM build AS build-api
# What nobody calls there: the installer, and Arrow's tests and headers.
WORKDIR /opt/eft/venv/lib/python3.11/site-packages
RUN rm -rf pip pip-*.dist-info setuptools setuptools-*.dist-info _distutils_hack distutils-precedence.pth \
       pyarrow/tests pyarrow/include pyarrow/src

FROM build AS build-worker
COPY locks/torch-cpu.txt locks/torch-deps.txt locks/app.txt /opt/eft/locks/
RUN /opt/eft/venv/bin/python -m pip install --no-cache-dir --no-deps --require-hashes \
       -r /opt/eft/locks/torch-cpu.txt -r /opt/eft/locks/torch-deps.txt
RUN /opt/eft/venv/bin/python -m pip install --no-cache-dir --no-deps --require-hashes -r /opt/eft/locks/app.txt
RUN /opt/eft/venv/bin/python -m pip check

FROM ${BASE} AS runtime
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="eft" \
      org.opencontainers.image.description="Self-hosted fine-tuning of language models" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 tini \
    && rm -rf /var/lib/apt/lists/*
RUN groupadd --system --gid 10001 eft \
    && useradd --system --uid 10001 --gid eft --home-dir /data --shell /usr/sbin/nologin eft \
    && install -d -o eft -g eft -m 0700 /data
ENV PATH="/opt/eft/venv/bin:${PATH}" \
    PYTHONPATH=/opt/eft/app \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    EFT_HOME=/opt/eft/app \
    EFT_DATA=/data \
    EFT_WORK=/data
WORKDIR /opt/eft/app
COPY LICENSE ./
COPY core ./core
COPY box ./box
COPY migrations ./migrations
VOLUME /data
ENTRYPOINT ["/usr/bin/tini", "-s", "--"]

FROM runtime AS worker
# Triton and our own CPU kernels are compiled where they run.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-worker /opt/eft/venv /opt/eft/venv
COPY worker ./worker
RUN python -m compileall -q .
# A trainer starts half a second sooner where transformers' names lie beside its bytecode; nothing is written later.
RUN env -u PYTHONDONTWRITEBYTECODE python -c \
       'from core.base import quick_imports; quick_imports.install(); import transformers.models'
LABEL org.opencontainers.image.title="eft worker (CPU)"
USER 10001:10001
HEALTHCHECK --interval=30s --timeout=20s --start-period=300s --retries=3 \
    CMD ["python", "-m", "box.healthy", "worker"]
CMD ["python", "-m", "worker"]

FROM runtime AS api
COPY --from=build-api /opt/eft/venv /opt/eft/venv
COPY api ./api
COPY examples/recipes ./examples/recipes
RUN python -m compileall -q .
# All that it needs is there, and PyTorch is not.
RUN python -c 'import api.server, pyarrow.parquet, importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is not None)'
LABEL org.opencontainers.image.title="eft API"
ENV EFT_HOST=0.0.0.0
EXPOSE 8321
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=3 \
    CMD ["python", "-m", "box.healthy", "api"]
CMD ["python", "-m", "api"]
