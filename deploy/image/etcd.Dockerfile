# etcd and etcdctl of Debian, as Tandem is tested with them. deploy/DESIGN.md, "Images".
#
#   docker build -f deploy/image/etcd.Dockerfile -t tandem-etcd:0.1.0 .
ARG BASE=debian:12-slim

FROM ${BASE} AS build
WORKDIR /src
COPY deploy/setup.sh deploy/setup.sh
RUN deploy/setup.sh --only ca-certificates etcd-client etcd-server
COPY deploy/image/collect.sh deploy/image/collect.sh
RUN deploy/image/collect.sh /image /usr/bin/etcd /usr/bin/etcdctl

FROM scratch
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tandem-etcd" \
      org.opencontainers.image.description="etcd for Tandem: who leads the store, which routers there are" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /image /
ENV PATH=/usr/bin ETCDCTL_API=3
WORKDIR /
USER 65532:65532
CMD ["/usr/bin/etcd"]
