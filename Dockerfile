# The images of docker-compose.yml:
#
#   coordinator   no torch
#   http          OpenAI's API: HTTP server, templates, tokenizers; no torch
#   worker        CPU build of torch
#   worker-gpu    torch with CUDA, NVRTC, and the C compiler that Triton builds its launchers with; no CUDA toolkit image
#                 below it: pip brings the libraries, the container runtime the driver
#
# What hisparse depends on is installed from pyproject.toml alone, before its code is copied: a change of code makes no
# layer anew but the last one, of a megabyte or two. Packages go into a virtual environment in a stage of its own, so that
# package lists and compilers stay behind. Processes are user 10001 and write to volumes alone, whose first content
# (owner, mode 0700) comes from the directories made here.
ARG BASE=docker.io/library/debian:bookworm-slim

FROM ${BASE} AS python
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 hisparse \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin hisparse \
    && install --directory --owner=10001 --group=10001 --mode=0700 \
        /run/hisparse /var/lib/hisparse /var/cache/hisparse /var/pool /model /keys
ENV PATH=/opt/hisparse/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/cache/hisparse

FROM python AS requirements
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt ./
RUN python3 -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
lists = {'coordinator': project['dependencies'], **project['optional-dependencies']}; \
[open(f'{name}.txt', 'w').write('\n'.join(lists[name])) for name in ('coordinator', 'http', 'worker', 'cuda')]" \
    && python3 -m venv /opt/hisparse \
    && pip install --no-cache-dir --constraint constraints.txt --requirement coordinator.txt

FROM requirements AS requirements-http
RUN pip install --no-cache-dir --constraint constraints.txt --requirement http.txt

FROM requirements AS requirements-worker
# PyPI's torch for x86-64 is the CUDA build, some gigabytes of it; the project's own index has the one for CPUs.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" --requirement worker.txt

FROM requirements AS requirements-worker-gpu
RUN pip install --no-cache-dir --requirement worker.txt --requirement cuda.txt

FROM requirements AS package
COPY . .
RUN pip install --no-cache-dir --no-deps --root /package .

FROM python AS coordinator
COPY --from=requirements /opt/hisparse /opt/hisparse
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
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=requirements-worker-gpu /opt/hisparse /opt/hisparse
COPY --from=package /package/opt/hisparse /opt/hisparse
ENV TRITON_CACHE_DIR=/var/cache/hisparse/triton
USER 10001:10001
ENTRYPOINT ["hisparse"]
CMD ["worker"]
