"""Print the requirements of setup.cfg without upper bounds, for the package and the extras in the argument."""

import configparser
import re
import sys

setup = configparser.ConfigParser()
setup.read("setup.cfg")
rows = setup["options"]["install_requires"].splitlines()
for extra in sys.argv[1].split(","):
    rows += setup["options.extras_require"][extra].splitlines()
print("\n".join(re.sub(r",?<=?[\d.]+", "", row) for row in rows if row))
