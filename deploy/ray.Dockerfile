# Ray's own image, which has what KubeRay's probes call, with Outrider in it: docker build -f deploy/ray.Dockerfile .
FROM rayproject/ray:2.60.0
COPY --chown=ray:users . /source
RUN pip install --no-cache-dir "/source[cpu,grammar,serve]"
