"""python -m ringtmp"""

from ringtmp.cli import main

main()
