# A server without export, PyTorch and transformers. `docs/scaling.md` says how it is built, run and stopped.
FROM python:3.12-slim AS build
ARG EXTRAS=cpu,grammar,serve
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY cli cli
COPY distill distill
COPY engines engines
COPY export export
COPY runtime runtime
COPY serve serve
RUN python -m venv /opt/outrider && /opt/outrider/bin/pip install --no-cache-dir ".[${EXTRAS}]"

FROM python:3.12-slim
COPY --from=build /opt/outrider /opt/outrider
ENV PATH=/opt/outrider/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8000
# A large bundle takes a while to load.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# Not a shell: SIGTERM reaches the server, which then answers what runs and takes nothing more.
ENTRYPOINT ["outrider", "serve"]
CMD ["/bundle", "--host", "0.0.0.0", "--port", "8000"]
