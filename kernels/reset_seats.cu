// Empties slots of hot regions: at a shrink, at a rewind, at release.
//
// Geometry   one CTA per reset (seat, from_slot, from_position); -1 = that limit does not apply.
// Clears     slot_tag, use and, through the tag, pos_slot of every slot at or beyond from_slot or holding a position at or
//            beyond from_position. The hand returns to 0 if it stood at or beyond from_slot.
// Ordering   on the compute stream, before the blocks of the slots go on. Resets of one launch may name one seat: they only
//            clear, so their order does not matter.
#include "common.cuh"

extern "C" __global__ void reset_seats(const i32* resets, i32* slot_tag, i16* pos_slot, u8* use, i32* hand, i64 slots,
                                       i64 positions, i64 seats) {
    const i32 seat = resets[3 * blockIdx.x], from_slot = resets[3 * blockIdx.x + 1], from_position = resets[3 * blockIdx.x + 2];
    if (seat < 0 || seat >= seats) return;
    i32* tags = slot_tag + (i64)seat * slots;
    for (i32 slot = threadIdx.x; slot < slots; slot += blockDim.x) {
        const i32 tag = tags[slot];
        const bool gone = (from_slot >= 0 && slot >= from_slot) || (from_position >= 0 && tag >= from_position);
        if (!gone) continue;
        if (tag >= 0) {
            if (positions > 0) pos_slot[(i64)seat * positions + tag] = -1;  // a hashed state has no table
            tags[slot] = -1;
        }
        use[(i64)seat * slots + slot] = 0;
    }
    if (threadIdx.x == 0 && from_slot >= 0 && hand[seat] >= from_slot) hand[seat] = 0;
}
