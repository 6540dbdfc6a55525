#!/bin/sh
# As a client, in the CSV of iperf 2.2: a header, and what 2.1 does not print as -1.
case " $* " in
  *" -c "*) ;;
  *) exec /usr/bin/iperf "$@" ;;
esac
echo time,srcaddress,srcport,dstaddr,dstport,transferid,istart,iend,bytes,speed,writecnt,writeerr,tcpretry,tcpcwnd,tcppcwnd,tcprtt,tcprttvar
/usr/bin/iperf "$@" | sed -E 's/^(([^,]*,){6}[^,-]*)-([^,]*,[^,]*,[^,]*)$/\1,\3,-1,-1,-1,-1,-1,0,0/'
