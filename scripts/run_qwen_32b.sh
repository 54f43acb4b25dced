#!/usr/bin/env bash
# Trains a 32B Qwen on several nodes, with the same command on each. docs/cluster.md explains every step.
#
#   MODEL=/shared/Qwen3-32B HEAD_ADDR=10.0.0.1 NODES=8 NODE_RANK=0 bash scripts/run_qwen_32b.sh --run_dir /shared/runs/first
#   srun --nodes 8 --ntasks-per-node 1 bash scripts/run_qwen_32b.sh --run_dir /shared/runs/first   # values from Slurm
#
# CONFIG      recipe: configs/qwen3_32b.yaml (default), configs/qwen2.5_32b.yaml, or your own
# MODEL       Hugging Face directory, the same path on every node; default: the recipe's
# ENGINE      vllm or sglang; default: the recipe's
# HEAD_ADDR   address of node 0 in the cluster's network; default: the first node of Slurm's list
# NODES, NODE_RANK   number of nodes, and this node's number, from 0; default: Slurm's
# NODE_ADDR   this node's address; default: found by route to HEAD_ADDR
# PORT        Ray's port on node 0, 6380; TOKEN_FILE: the shared key; default: created next to run_dir
# GPUS_PER_NODE      GPUs per node; default: this node's, else the recipe's
# NODES_TIMEOUT_S    timeout for all nodes to join, 600
# SILENCE_S   a node that does not answer for this time counts as lost, 30
# RESTARTS    restarts after a death, -1 for any number; give the same on every node (docs/cluster.md); default: 0
# PLAN=0      train without planning first
# DRY_RUN=1   print the commands and start nothing
#
# The run uses every GPU of these nodes. Idle GPUs are an error (cluster.allow_idle_gpus).
# Further arguments are flags of `slime-like train`. Restart to resume from the last checkpoint.
set -euo pipefail
REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

SLIME="${SLIME:-$REPO/.venv/bin/slime-like}"
[ -x "$SLIME" ] || SLIME="$(command -v slime-like)" || {
    echo "slime-like: no slime-like in $REPO/.venv and none on PATH; install it, or run in its image (docs/cluster.md)" >&2
    exit 1
}

refuse() {
    echo "slime-like: $1" >&2
    exit 2
}
for switch in PLAN DRY_RUN; do
    case "${!switch:-}" in
        "" | 0 | 1) ;;
        *) refuse "$switch=${!switch} is neither 0 nor 1; use one of these two" ;;
    esac
done
# A step may have only some of the job's nodes; SLURM_NODEID counts the step's nodes.
slurm_nodes="${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}"
if [ -n "${SLURM_STEP_NUM_TASKS:-}" ] && [ -z "${NODE_RANK:-}" ] &&
    [ "$SLURM_STEP_NUM_TASKS" != "${SLURM_STEP_NUM_NODES:-$SLURM_STEP_NUM_TASKS}" ]; then
    refuse "srun started $SLURM_STEP_NUM_TASKS tasks on $SLURM_STEP_NUM_NODES nodes; start one on each: srun --ntasks-per-node 1"
fi

options=(--node_rank "${NODE_RANK:-${SLURM_NODEID:-0}}")
[ -z "${NODES:-}" ] || options+=(--nodes "$NODES")
if [ -n "$slurm_nodes" ] && { [ -z "${NODES:-}" ] || [ -z "${HEAD_ADDR:-}" ]; }; then
    options+=(--slurm_nodes "$slurm_nodes") # gives the number of nodes, and node 0
fi
[ -z "${HEAD_ADDR:-}" ] || options+=(--head "$HEAD_ADDR")
[ -z "${NODE_ADDR:-}" ] || options+=(--address "$NODE_ADDR")
[ -z "${PORT:-}" ] || options+=(--port "$PORT")
[ -z "${TOKEN_FILE:-}" ] || options+=(--token_file "$TOKEN_FILE")
[ -z "${GPUS_PER_NODE:-}" ] || options+=(--gpus_per_node "$GPUS_PER_NODE")
[ -z "${NODES_TIMEOUT_S:-}" ] || options+=(--nodes_timeout_s "$NODES_TIMEOUT_S")
[ -z "${SILENCE_S:-}" ] || options+=(--silence_s "$SILENCE_S")
[ -z "${RESTARTS:-}" ] || options+=(--restarts "$RESTARTS")
[ "${PLAN:-1}" = 1 ] || options+=(--no_plan)
[ "${DRY_RUN:-0}" = 0 ] || options+=(--dry_run)

flags=()
[ -z "${MODEL:-}" ] || flags+=(--model.path "$MODEL")
[ -z "${ENGINE:-}" ] || flags+=(--rollout.engine "$ENGINE")

cd "$REPO" # relative paths, also in recipes, mean the same on every node
exec "$SLIME" launch "${CONFIG:-configs/qwen3_32b.yaml}" "${options[@]}" -- "${flags[@]}" "$@"
