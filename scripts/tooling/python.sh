# Sourced by the first commands of the README: sets $PYTHON to a Python >= 3.10, or says what to do.
# POSIX shell, because there may be no Python to say it.
found=
for PYTHON in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10 python3.14; do
  version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  found="$found $PYTHON is $version;"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' && return
done
echo "${0##*/}: Python 3.10 or newer is needed;${found:- none was found on PATH.}" >&2
echo "  Install one (apt install python3 python3-venv; dnf install python3), or name it: PYTHON=/path/to/python ${0}" >&2
exit 1
