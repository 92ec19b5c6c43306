# smg and vllm-router, which are put before several servers.  From the repository root:
#   docker build -f docker/router.Dockerfile -t mlx-batch-server-router .
FROM python:3.11-slim

ENV PYTHONUNBUFFERED=1 \
    HOST=0.0.0.0

WORKDIR /srv/router

COPY requirements/routers.txt ./
RUN pip install --no-cache-dir -r routers.txt

COPY deploy/routers/smg.sh deploy/routers/vllm-router.sh ./

RUN useradd --uid 1000 router
USER router

EXPOSE 8000

CMD ["./smg.sh", "8000", "http://replica-1:8000", "http://replica-2:8000"]
