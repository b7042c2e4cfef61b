# The image of the examples and of the recipes for other schedulers, from the root of the repository:
#   docker build -f deploy/containers/examples.Dockerfile -t dlrover-examples:1.0.0rc1 .
# For several platforms: docker buildx build --platform linux/amd64,linux/arm64 ...
# Without a registry: scripts/build-images. Behind a package index of your own: --secret id=pip,src=pip.conf
ARG PYTHON=python:3.12.12-slim-bookworm

FROM ${PYTHON} AS build
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md LICENSE constraints.txt ./
COPY native native
COPY src src
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/dlrover \
 && /opt/dlrover/bin/pip install --no-cache-dir --constraint constraints.txt '.[example,metrics,rules]' \
 && /opt/dlrover/bin/pip uninstall --yes pip

FROM ${PYTHON}
COPY --from=build /opt/dlrover /opt/dlrover
COPY examples /examples
WORKDIR /examples
ENV PATH=/opt/dlrover/bin:$PATH \
    HOME=/tmp \
    DLROVER_STATE_DIR=/tmp/dlrover \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
CMD ["dlrover-run", "--help"]
