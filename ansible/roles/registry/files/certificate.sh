#!/bin/sh
# certificate.sh FOLDER NAME ALTERNATIVE: an own CA, and a certificate by it. The CA's key is not kept:
# nobody can sign with it later.
set -eu
umask 077
cd "$1"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
openssl req -x509 -newkey rsa:3072 -nodes -days 3650 -subj "/CN=sm120 registry CA" \
    -addext keyUsage=critical,keyCertSign,cRLSign \
    -keyout "$scratch/ca.key" -out ca.crt 2>/dev/null
openssl req -newkey rsa:3072 -nodes -subj "/CN=$2" -keyout server.key -out "$scratch/request" 2>/dev/null
echo "subjectAltName=$3" >"$scratch/names"
openssl x509 -req -in "$scratch/request" -CA ca.crt -CAkey "$scratch/ca.key" -CAcreateserial \
    -CAserial "$scratch/serial" -days 825 -extfile "$scratch/names" -out "$scratch/server.crt" 2>/dev/null
chown docker-registry: ca.crt server.key "$scratch/server.crt"
chmod 644 ca.crt
# last, because the role takes it for the sign that all is there
mv "$scratch/server.crt" server.crt
