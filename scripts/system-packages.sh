#!/bin/sh
# Install the system packages that the set-up needs: Python's venv module, Java 17 to 21 for Spark, Debian's
# PostgreSQL 15 as one more version to test on, and Prometheus and Chromium for tests of the server and its page.
# Without root, print how to install them; the set-up continues without all but the first.
# Usage: system-packages.sh <python>
set -eu

python=${1:-python3}
cluster_settings=/etc/postgresql-common/createcluster.d/penstock.conf
# Keep Debian's package from creating and starting a server; only its programs are used.
# The same for Debian's Prometheus: no service is started.
no_services=/usr/sbin/policy-rc.d
no_cluster="mkdir -p ${cluster_settings%/*} && echo 'create_main_cluster = false' > $cluster_settings"
missing=
needed=

if ! command -v "$python" >/dev/null; then
    echo "make: found no '$python'. Choose another interpreter: make setup PYTHON=/path/to/python3.12" >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
    echo "make: Penstock needs Python 3.11 to 3.13, but '$python' is $("$python" -V 2>&1)." >&2
    echo "      Choose another interpreter: make setup PYTHON=/path/to/python3.12" >&2
    exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    needed="python3-venv"
fi
if [ ! -x /usr/lib/postgresql/15/bin/postgres ] && command -v apt-get >/dev/null; then
    missing="postgresql-15"
fi
if command -v apt-get >/dev/null; then
    command -v promtool >/dev/null || missing=$(echo $missing prometheus)
    command -v chromium >/dev/null || missing=$(echo $missing chromium fonts-dejavu-core)
fi
java_found=
for java in ${JAVA_HOME:+"$JAVA_HOME/bin/java"} java /usr/lib/jvm/*/bin/java; do
    version=$("$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1)
    if [ "${version:-0}" -ge 17 ] && [ "$version" -le 21 ]; then
        java_found=$java
        break
    fi
done
if [ -z "$java_found" ]; then
    missing=$(echo $missing default-jre-headless)
fi
if [ -z "$needed$missing" ]; then
    exit 0
fi

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "make: installing with apt-get:" $needed $missing
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || echo "make: apt-get update failed; continuing with the existing package lists" >&2
    if [ -n "$needed" ]; then
        apt-get install -y -qq -o Dpkg::Use-Pty=0 --no-install-recommends $needed >/dev/null
    fi
    if [ -n "$missing" ]; then
        made=
        if [ ! -e "$cluster_settings" ]; then
            sh -c "$no_cluster"
            made=$cluster_settings
        fi
        if [ ! -e "$no_services" ]; then
            printf '#!/bin/sh\nexit 101\n' >"$no_services"
            chmod +x "$no_services"
            made="$made $no_services"
        fi
        trap 'rm -f $made' EXIT
        apt-get install -y -qq -o Dpkg::Use-Pty=0 --no-install-recommends $missing >/dev/null ||
            echo "make: could not install $missing; tests that need it are skipped or fail" >&2
    fi
    exit 0
fi

install="apt-get update && apt-get install -y --no-install-recommends $(echo $needed $missing)"
if [ -n "$missing" ]; then
    install="$no_cluster && $install"
fi
{
    echo "make: missing on this machine: $(echo $needed $missing). To install (needs root):"
    echo "    sudo sh -c \"$install\""
} >&2
if [ -n "$needed" ]; then
    echo "make: cannot create an environment without $needed." >&2
    exit 1
fi
echo "make: continuing without $missing; tests that need it are skipped and listed, those on Spark fail." >&2
