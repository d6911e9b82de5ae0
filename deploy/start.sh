#!/usr/bin/env bash
# Start the whole service on this box: deploy/start.sh [rocm|cuda|cpu] [--build] [arguments of `docker compose up`…]
#
# Makes what is missing, and changes nothing that is there: deploy/secrets/* (random passwords), .env (the profile
# and the numbers of the groups that may use the GPUs). Then `docker compose up`, and the first API key, shown once.
set -euo pipefail
cd "$(dirname "$0")/.."

profile=${1:-}
if [[ -z $profile ]]; then
  if [[ -e /dev/kfd ]]; then profile=rocm
  elif [[ -e /dev/nvidiactl ]]; then profile=cuda
  else profile=cpu; fi
  echo "no profile given: $profile, by the devices of this box"
else
  shift
fi
case $profile in
  rocm | cuda | cpu) ;;
  *) echo "usage: deploy/start.sh [rocm|cuda|cpu] [--build] […]" >&2; exit 2 ;;
esac
if [[ $profile == rocm && ! -e /dev/kfd ]]; then
  echo "there is no /dev/kfd on this box: is the amdgpu driver loaded? (docs/install-rocm.md)" >&2
  exit 1
fi
if ! docker compose version > /dev/null; then
  echo "Docker Engine with compose 2.24 or newer is needed; nothing was made (docs/containers.md)" >&2
  exit 1
fi

# The folder is this user's alone, the files in it are everybody's: compose mounts each file by itself into a container
# whose user is nobody here, with the mode it has here.
secrets=deploy/secrets
mkdir -p -m 0700 $secrets
for name in database_password broker_password; do
  if [[ ! -s $secrets/$name ]]; then
    (umask 022; head -c 32 /dev/urandom | base64 | tr -d '/+=\n' > "$secrets/.$name")
    mv "$secrets/.$name" "$secrets/$name"
    echo "made $secrets/$name"
  fi
done

# Where they were while docker-compose.yml lay in deploy/.
for name in .env compose.override.yaml; do
  if [[ -e deploy/$name && ! -e $name ]]; then
    mv "deploy/$name" "$name"
    echo "moved deploy/$name to $name"
  fi
done
if [[ ! -e .env ]]; then
  {
    echo "# Made by deploy/start.sh; yours from now on. Read by docker compose (docker-compose.yml)."
    echo "COMPOSE_PROFILES=$profile"
    echo "EFT_NODE=$(uname -n)"
    render=$(stat -c %g /dev/kfd 2>/dev/null || true)
    card=$(stat -c %g /dev/dri/card* 2>/dev/null | head -n 1 || true)
    [[ -z $render ]] || echo "EFT_RENDER_GID=$render"
    [[ -z $card ]] || echo "EFT_VIDEO_GID=$card"
  } > .env
  echo "made .env"
fi

# No --file: the same files as for `docker compose` in this folder, docker-compose.override.yml or COMPOSE_FILE too.
compose=(docker compose --profile "$profile")
"${compose[@]}" up --detach "$@"

# Made once, and in that file before it counts: a start that was cut short shows it at the next.
"${compose[@]}" exec -T api python -m api.auth.keys create --project default --user admin --name first \
  --if-none /data/first.key > /dev/null
"${compose[@]}" exec -T api sh -c \
  'if [ -e /data/first.key ]; then echo "your API key, shown this once: $(cat /data/first.key)"; rm /data/first.key; fi'
"${compose[@]}" ps
echo "the API: http://$("${compose[@]}" port api 8321)/docs"
