# The images of docker-compose.yml:
#
#   coordinator   no torch; sends traces
#   http          OpenAI's API: HTTP server, templates, tokenizers; no torch; sends traces
#   worker        CPU build of torch
#   worker-gpu    torch with CUDA, NVRTC, and the C compiler that Triton builds its launchers with; no CUDA toolkit image
#                 below it: pip brings the libraries, the container runtime the driver
#
# What hisparse depends on is installed from locks/*.txt, with hashes, before its code is copied: a change of code or of
# pyproject.toml makes no layer anew but the last one, of a megabyte or two. `make lock` writes the locks from pyproject.toml
# and constraints.txt. Packages go into a virtual environment without pip, by the pip of another one, so that installers,
# package lists and compilers stay behind. Caches of apt and pip are mounts (BuildKit), and lie in no layer.
#
# Processes are user 10001 and write to volumes alone, whose first content (owner, mode 0700) comes from the directories
# made here.
#
# The digest is that of Docker Hub for this tag, as other projects have it in their files; replace both together. Another
# base needs Debian's python3 3.11: --build-arg BASE=...
ARG BASE=docker.io/library/debian:bookworm-20251229-slim@sha256:d5d3f9c23164ea16f31852f95bd5959aad1c5e854332fe00f7b3a20fcc9f635c

FROM ${BASE} AS python
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked --mount=type=cache,target=/var/lib/apt/lists,sharing=locked \
    apt-get update \
    && apt-get install --yes --no-install-recommends python3 \
    && groupadd --gid 10001 hisparse \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin hisparse \
    && install --directory --owner=10001 --group=10001 --mode=0700 \
        /run/hisparse /var/lib/hisparse /var/cache/hisparse /var/pool /model /keys
ENV PATH=/opt/hisparse/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/cache/hisparse

FROM python AS installer
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked --mount=type=cache,target=/var/lib/apt/lists,sharing=locked \
    apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && python3 -m venv /opt/pip \
    && python3 -m venv --without-pip /opt/hisparse
WORKDIR /src
ENV XDG_CACHE_HOME=/root/.cache \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    INSTALL="/opt/pip/bin/pip --python /opt/hisparse/bin/python install --no-deps --require-hashes --only-binary :all:"

FROM installer AS requirements-coordinator
COPY locks/coordinator.txt ./
RUN --mount=type=cache,target=/root/.cache/pip ${INSTALL} --requirement coordinator.txt

FROM installer AS requirements-http
COPY locks/http.txt ./
RUN --mount=type=cache,target=/root/.cache/pip ${INSTALL} --requirement http.txt

FROM installer AS requirements-worker
# PyPI's torch for x86-64 is the CUDA build, some gigabytes of it; the index of the torch project has the CPU build. Only
# torch comes from there, and nothing else is looked for in two places.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY locks/torch-cpu.txt ./
RUN --mount=type=cache,target=/root/.cache/pip ${INSTALL} --index-url "${TORCH_INDEX}" --requirement torch-cpu.txt
COPY locks/worker.txt ./
RUN --mount=type=cache,target=/root/.cache/pip ${INSTALL} --requirement worker.txt

FROM installer AS requirements-worker-gpu
COPY locks/worker-gpu.txt ./
RUN --mount=type=cache,target=/root/.cache/pip ${INSTALL} --requirement worker-gpu.txt

FROM installer AS package
COPY locks/build.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/pip/bin/pip install --no-deps --require-hashes --only-binary :all: --requirement build.txt
COPY . .
RUN /opt/pip/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheel . \
    && /opt/pip/bin/pip --python /opt/hisparse/bin/python install --no-cache-dir --no-deps --no-index --root /package /wheel/*.whl

FROM python AS coordinator
COPY --from=requirements-coordinator /opt/hisparse /opt/hisparse
COPY --from=package /package/opt/hisparse /opt/hisparse
USER 10001:10001
ENTRYPOINT ["hisparse"]
CMD ["coordinator"]

FROM python AS http
COPY --from=requirements-http /opt/hisparse /opt/hisparse
COPY --from=package /package/opt/hisparse /opt/hisparse
USER 10001:10001
ENTRYPOINT ["hisparse"]
CMD ["http"]

FROM python AS worker
COPY --from=requirements-worker /opt/hisparse /opt/hisparse
COPY --from=package /package/opt/hisparse /opt/hisparse
USER 10001:10001
ENTRYPOINT ["hisparse"]
CMD ["worker"]

FROM python AS worker-gpu
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked --mount=type=cache,target=/var/lib/apt/lists,sharing=locked \
    apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev
COPY --from=requirements-worker-gpu /opt/hisparse /opt/hisparse
COPY --from=package /package/opt/hisparse /opt/hisparse
ENV TRITON_CACHE_DIR=/var/cache/hisparse/triton
USER 10001:10001
# Kernels of CUDA for these GPUs, so that a first start compiles fewer: they are the first content of the cache's volume.
# --build-arg KERNELS="sm_90 sm_100"; empty: none.
ARG KERNELS=sm_90
RUN [ -z "${KERNELS}" ] || hisparse kernels build $(printf -- '--arch %s ' ${KERNELS})
ENTRYPOINT ["hisparse"]
CMD ["worker"]
