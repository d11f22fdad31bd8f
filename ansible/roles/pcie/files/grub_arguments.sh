#!/bin/sh
# The kernel's arguments as update-grub would write them: a line for each of GRUB's settings files, in the order
# in which GRUB reads them, with the arguments as they are after it, and `end` where all were read. Reads only.
GRUB_CMDLINE_LINUX='' GRUB_CMDLINE_LINUX_DEFAULT=''
for file in /etc/default/grub /etc/default/grub.d/*.cfg; do
    [ ! -e "$file" ] || . "$file" >/dev/null 2>&1
    printf '%s\t%s\n' "$file" "$(echo $GRUB_CMDLINE_LINUX $GRUB_CMDLINE_LINUX_DEFAULT)"
done
printf 'end\t\n'
exit 0
