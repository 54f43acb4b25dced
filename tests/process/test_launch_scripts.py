"""Words that are read from a launch script without a shell, and those that bash passes."""

import subprocess

from slime_like.config.foreign.launch_script import launches

BASH = r"""
A=4; B="two words"; C='$A'; D=${A}x; E="$A $B"
export F=${UNSET_HERE:-7} G="${UNSET_HERE:-"in $A"}"
: "${UNSET_HERE:-}"
A+=2
LIST=(--first "$B" --second)   # a comment ' with a quote
LIST+=($E "${B}" 'single $A' a\ b "c\"d" "e\$f")
if true; then :; fi
for I in 1; do :; done
python3 eval.py --lr 9 && cd .
cat <<EOF >/dev/null
python3 train.py --from-a-here-document
EOF
{ :; } 2>/dev/null
python3 train.py $A $B "$B" $C "$C" ${D} --e "$E" --e=$E -- $F "$G" $((A * 2 - 7 / 2)) $((-7 / 2 + 10)) $((-7 % 3)) \
   "${LIST[@]}" \
   --x='y z' a#b "#c" $((10#1 + 0)) 2>&1 | cat
A=99
"""


def test_words_are_those_of_a_shell() -> None:
    shown = r"""python3() { [ "$1" != train.py ] || { shift; printf '%s\0' "$@"; }; }"""
    done = subprocess.run(["bash", "-c", shown + BASH], capture_output=True, text=True, timeout=20, check=True)
    [launch] = launches(BASH, lambda words: any(word.text == "train.py" for word in words))
    words = [word.text for word in launch.words if word.known][2:]
    assert words == [word for word in done.stdout.split("\0")[:-1] if word != "1"]
    assert [word.text for word in launch.words if not word.known] == ["$((10#1+0))"]
