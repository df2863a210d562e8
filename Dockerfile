# An image that trains on GPUs: CUDA 13, the pinned packages of requirements/, packgraph.
#
#     docker build -t packgraph .
#     docker build -t packgraph --build-arg FLASH_ATTN_4=4.0.0b36 .    # with flash-attn-4
#     docker run --gpus all --shm-size 16g -v "$PWD/runs:/work/runs" packgraph train qwen3-tiny
#
# The project's checks do not build it.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

ARG FLASH_ATTN_4=
ENV PATH=/opt/packgraph/bin:$PATH PIP_NO_CACHE_DIR=1

# Triton compiles its launchers with a C compiler and Python's headers.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY requirements/run.txt requirements/torch.txt requirements/
RUN python3 -m venv /opt/packgraph \
    && pip install -r requirements/run.txt \
    && pip install -r requirements/torch.txt
RUN test -z "$FLASH_ATTN_4" || pip install "flash-attn-4[cu13]==$FLASH_ATTN_4"
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-deps --no-build-isolation .

WORKDIR /work
ENTRYPOINT ["packgraph"]
