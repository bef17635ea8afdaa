// SPDX-License-Identifier: GPL-2.0-only
/*
 * The modelled TLB on a stream of accesses, for comparing it with the simulator's: that one's test compiles and runs this.
 *
 *   tlb_stream SETS WAYS .. (of all arrays) IS_SECOND_SMALL
 *
 * Reads lines from standard input: "a GVA SHIFT", an access to a page of 2^SHIFT bytes; "i GVA", an invalidation; "f", one
 * of all. GVAs are hexadecimal. Writes an "h" for each access that hits, and an "m" for each that misses.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "tlb_model.h"

static struct tlb tlb;

int main(int argc, char **argv)
{
	struct tlb_sizes sizes = { 0 };
	char line[64];

	if (argc != 2 + 2 * TLB_ARRAYS)
		return 2;
	for (unsigned int array = 0; array < TLB_ARRAYS; array++) {
		sizes.of[array].sets = (uint32_t)atoi(argv[1 + 2 * array]);
		sizes.of[array].ways = (uint32_t)atoi(argv[2 + 2 * array]);
		if (!tlb_geometry_is_sound(sizes.of[array]))
			return 2;
	}
	sizes.is_second_small = atoi(argv[1 + 2 * TLB_ARRAYS]);
	while (fgets(line, sizeof(line), stdin)) {
		unsigned int shift;
		uint64_t gva;

		if (sscanf(line, "a %" SCNx64 " %u", &gva, &shift) == 2) {
			bool is_hit = tlb_hit(&tlb, &sizes, gva);

			/* The emulator's own question changes nothing. */
			if (is_hit != tlb_holds(&tlb, &sizes, gva))
				return 3;
			if (!is_hit)
				tlb_enter(&tlb, &sizes, gva, shift, false);
			putchar(is_hit ? 'h' : 'm');
		} else if (sscanf(line, "i %" SCNx64, &gva) == 1) {
			tlb_forget(&tlb, &sizes, gva);
		} else if (line[0] == 'f') {
			tlb_forget_all(&tlb, &sizes, false);
		} else {
			return 2;
		}
	}
	return 0;
}
