// Asks the compiled NCCL which ring it would take on hosts that are made up here, and compares.
// No GPU, no driver and no second process are needed: these are the functions that a communicator
// calls when it starts, fed with a description of the host instead of the host.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "comm.h"
#include "graph.h"
#include "topo.h"
#include "xml.h"

struct Host {
  const char* name;
  const char* vendor;
  int family;  // as xml.cc writes it: 15 + (extended family << 4) for AMD
  int sockets, switches, cards;  // switches of a socket, cards of a switch
  // what must come out
  int channels;  // 0: any ring will do
  float bandwidth;  // of one channel, GB/s
  const char* farthest;
  bool p2pInSocket, p2pAcross;
};

static const Host hosts[] = {
  // The patches leave these as they are: other processors, and more cards than were measured.
  {"Intel, 2 sockets, 8 cards", "GenuineIntel", 6, 2, 2, 2, 2, 20, "SYS", false, false},
  {"Zen 2, 2 sockets, 8 cards", "AuthenticAMD", 143, 2, 2, 2, 1, 0.1f, "SYS", false, false},
  {"Zen 4, 2 sockets, 8 cards", "AuthenticAMD", 175, 2, 2, 2, 1, 0.1f, "SYS", false, false},
  {"Zen 4 as newer NCCL writes it", "AuthenticAMD", 25, 2, 2, 2, 1, 0.1f, "SYS", false, false},
  {"Zen 4, 1 socket, 4 cards, no switch", "AuthenticAMD", 175, 1, 4, 1, 2, 24, "PHB", false, false},
  {"Zen 5, 1 socket, 2 cards", "AuthenticAMD", 191, 1, 2, 1, 2, 24, "PHB", true, true},
  {"Zen 5, 2 sockets, 12 cards", "AuthenticAMD", 191, 2, 3, 2, 0, 0, "", false, false},
  // Without them no P2P.
  {"Zen 5, 1 socket, 4 cards, no switch", "AuthenticAMD", 191, 1, 4, 1, 2, 24, "PHB", true, true},
  // Without them one channel of 0.1 GB/s, and P2P only where a switch joins two cards.
  {"Zen 5, 2 sockets, 8 cards", "AuthenticAMD", 191, 2, 2, 2, 2, 20, "SYS", true, false},
  {"Zen 5, 2 sockets, 8 cards, no switch", "AuthenticAMD", 191, 2, 4, 1, 2, 20, "SYS", true, false},
  {"Zen 5, 2 sockets, 4 cards", "AuthenticAMD", 191, 2, 2, 1, 2, 20, "SYS", true, false},
  {"Zen 5 as newer NCCL writes it", "AuthenticAMD", 26, 2, 2, 2, 2, 20, "SYS", true, false},
};

static std::string pci(int bus, const char* type) {
  char text[400];
  snprintf(text, sizeof text,
    "<pci busid=\"0000:%02x:00.0\" class=\"%s\" vendor=\"0x10de\" device=\"0x2bb1\" "
    "subsystem_vendor=\"0\" subsystem_device=\"0\" link_speed=\"32.0 GT/s PCIe\" link_width=\"16\">",
    bus, type);
  return text;
}

// PCIe 5.0 with 16 lanes everywhere, and one network card: NCCL's last resort asks for one.
static std::string description(const Host& host) {
  std::string text = "<system version=\"1\">\n";
  int rank = 0;
  for (int s = 0; s < host.sockets; s++) {
    text += "<cpu host_hash=\"0x0\" numaid=\"" + std::to_string(s) + "\" affinity=\"ff\" arch=\"x86_64\" vendor=\"" +
      host.vendor + "\" familyid=\"" + std::to_string(host.family) + "\" modelid=\"207\">\n";
    for (int w = 0; w < host.switches; w++) {
      int bus = (s * 8 + w * 2 + 1) * 16;
      if (host.cards > 1) text += pci(bus, "0x060400") + "\n";
      for (int c = 0; c < host.cards; c++, rank++) {
        std::string number = std::to_string(rank);
        text += pci(bus + c + 1, "0x030200") + "<gpu dev=\"" + number + "\" sm=\"120\" rank=\"" + number + "\" gdr=\"1\"/></pci>\n";
      }
      if (host.cards > 1) text += "</pci>\n";
    }
    if (s == 0)
      text += "<nic><net name=\"eth0\" dev=\"0\" speed=\"10000\" port=\"0\" latency=\"0\" guid=\"0x0\" maxconn=\"65536\" gdr=\"0\"/></nic>\n";
    text += "</cpu>\n";
  }
  return text + "</system>\n";
}

static ncclResult_t ask(const Host& host, struct ncclTopoGraph* ring, int* inSocket, int* across) {
  const char* path = "/tmp/host.xml";
  FILE* file = fopen(path, "w");
  if (file == NULL) return ncclSystemError;
  fputs(description(host).c_str(), file);
  fclose(file);
  struct ncclXml* xml;
  NCCLCHECK(xmlAlloc(&xml, NCCL_TOPO_XML_MAX_NODES));
  NCCLCHECK(ncclTopoGetXmlFromFile(path, xml, 1));
  struct ncclTopoSystem* system;
  NCCLCHECK(ncclTopoGetSystemFromXml(xml, &system, 0));
  NCCLCHECK(ncclTopoComputePaths(system, NULL));
  NCCLCHECK(ncclTopoSearchInit(system));
  memset(ring, 0, sizeof *ring);
  ring->pattern = NCCL_TOPO_PATTERN_RING;
  ring->minChannels = 1;
  ring->maxChannels = MAXCHANNELS/2;
  NCCLCHECK(ncclTopoCompute(system, ring));
  int perSocket = host.switches * host.cards;
  int last = host.sockets * perSocket - 1;
  NCCLCHECK(ncclTopoCheckP2p(NULL, system, 0, perSocket - 1, inSocket, NULL, NULL, NULL));
  NCCLCHECK(ncclTopoCheckP2p(NULL, system, 0, last, across, NULL, NULL, NULL));
  ncclTopoFree(system);
  free(xml);
  return ncclSuccess;
}

int main() {
  setenv("NCCL_IGNORE_DISABLED_P2P", "2", 1);  // the cards are made up: do not ask the driver
  int wrong = 0;
  for (const Host& host : hosts) {
    static struct ncclTopoGraph ring;
    int inSocket = -1, across = -1;
    if (ask(host, &ring, &inSocket, &across) != ncclSuccess) {
      printf("%-38s NCCL failed\n", host.name);
      wrong++;
      continue;
    }
    const char* farthest = topoPathTypeStr[ring.typeIntra];
    bool sameRing = host.channels == 0 || (ring.nChannels == host.channels &&
      ring.bwIntra == host.bandwidth && strcmp(farthest, host.farthest) == 0);
    bool good = sameRing && inSocket == host.p2pInSocket && across == host.p2pAcross;
    printf("%-38s %d x %.1f GB/s over %s, P2P in a socket %d, first to last card %d%s\n", host.name,
      ring.nChannels, ring.bwIntra, farthest, inSocket, across, good ? "" : ": wrong");
    wrong += !good;
  }
  return wrong ? 1 : 0;
}
