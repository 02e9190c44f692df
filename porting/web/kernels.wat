;; What takes the time of a pass, for processors that do one thing to four numbers at once. This is
;; WebAssembly's text format in a shorter hand, which assemble.py explains and spells out.
;;
;; A product reads its matrix (rows, width) once, as one stream, so it is stored in this order:
;;
;;     for each four rows
;;         for each eight columns
;;             these columns of the first row, of the second, the third and the fourth
;;
;; Two tokens share what is read. Each of them has four sums, over rising columns, whether it comes
;; alone or with another one. So its numbers have the same bits in every block of tokens.
(module
  (memory (import "env" "memory") 1)

  ;; Lane i of the result is the sum of the lanes of argument i.
  (func $across (param $a v128) (param $b v128) (param $c v128) (param $d v128) (result v128)
    (set $a (f32x4.add
      (i8x16.shuffle 0 1 2 3 16 17 18 19 4 5 6 7 20 21 22 23 $a $b)
      (i8x16.shuffle 8 9 10 11 24 25 26 27 12 13 14 15 28 29 30 31 $a $b)))
    (set $c (f32x4.add
      (i8x16.shuffle 0 1 2 3 16 17 18 19 4 5 6 7 20 21 22 23 $c $d)
      (i8x16.shuffle 8 9 10 11 24 25 26 27 12 13 14 15 28 29 30 31 $c $d)))
    (f32x4.add
      (i8x16.shuffle 0 1 2 3 4 5 6 7 16 17 18 19 20 21 22 23 $a $c)
      (i8x16.shuffle 8 9 10 11 12 13 14 15 24 25 26 27 28 29 30 31 $a $c)))

  ;; x (T, width) -> y (T, rows), by a matrix w in float32 (4 bytes a weight), or by one of whole
  ;; numbers in int8 (1 byte), each row of which has a scale.
  (each size (4 1)
    (func (export "{'floats' if size == 4 else 'codes'}") (param $w i32) (param $x i32)
        (param $y i32) (param $width i32) (param $rows i32) (param $T i32) (param $scale i32)
      (local $last i32) (local $end i32) (local $left i32) (local $from i32) (local $to i32)
      (local $i i32) (local $m v128)
      (each t 2 (local $x{t} i32) (each h 2 (local $v{t}{h} v128)) (each r 4 (local $s{t}{r} v128)))
      (set $last (i32.add $y (i32.mul $rows 4)))
      (loop $rows
        (set $end (i32.add $w (i32.mul $width {4 * size})))
        (set $left $T)
        (set $from $x)
        (set $to $y)
        (each n (2 1)                                       ;; tokens in twos, and one that is left
          (block $none{n} (loop $tokens{n}
            (br_if $none{n} (i32.lt_u $left {n}))
            (each t {n}
              (set $x{t} (i32.add $from (i32.mul $width {4 * t})))
              (each r 4 (set $s{t}{r} (v128.const i32x4 0 0 0 0))))
            (set $i $w)
            (loop $columns{n}
              (each t {n} (each h 2 (set $v{t}{h} (v128.load offset={16 * h} $x{t}))))
              (each r 4 (each h 2
                (when {size == 4} (set $m (v128.load offset={32 * r + 16 * h} $i)))
                (when {size == 1} (set $m (f32x4.convert_i32x4_s
                  (i32x4.extend_{'high' if h else 'low'}_i16x8_s (v128.load8x8_s offset={8 * r} $i)))))
                (each t {n} (set $s{t}{r} (madd $s{t}{r} $m $v{t}{h})))))
              (each t {n} (set $x{t} (i32.add $x{t} 32)))
              (br_if $columns{n} (i32.lt_u (tee $i (i32.add $i {32 * size})) $end)))
            (each t {n}
              (set $m (call $across $s{t}0 $s{t}1 $s{t}2 $s{t}3))
              (when {size == 1} (set $m (f32x4.mul $m (v128.load $scale))))
              (v128.store $to $m)
              (set $to (i32.add $to (i32.mul $rows 4))))
            (set $from $x{n - 1})
            (set $left (i32.sub $left {n}))
            (br $tokens{n}))))
        (set $w $end)
        (set $scale (i32.add $scale 16))
        (br_if $rows (i32.lt_u (tee $y (i32.add $y 16)) $last)))))

  ;; x (T, width) -> whole numbers from -127 to 127, in int16, and behind each token's the scales of
  ;; every 32 of them.
  (func (export "round") (param $x i32) (param $to i32) (param $width i32) (param $T i32)
    (local $end i32) (local $scales i32) (local $i i32) (local $most v128) (local $scale f32)
    (local $by v128) (each h 2 (local $v{h} v128))
    (loop $tokens
      (set $end (i32.add $x (i32.mul $width 4)))
      (set $scales (i32.add $to (i32.mul $width 2)))
      (loop $groups
        (set $most (v128.const i32x4 0 0 0 0))
        (set $i (i32.const 0))
        (loop $four
          (set $most (f32x4.max $most (f32x4.abs (v128.load (i32.add $x $i)))))
          (br_if $four (i32.lt_u (tee $i (i32.add $i 16)) 128)))
        (set $scale (f32.div (call $largest $most) (f32.const 127)))
        (f32.store $scales $scale)
        (set $scales (i32.add $scales 4))
        (set $by (f32x4.splat (f32.div (f32.const 1) (f32.max $scale (f32.const 1e-30)))))
        (set $i (i32.add $x 128))
        (loop $eight
          (each h 2 (set $v{h} (i32x4.trunc_sat_f32x4_s
            (f32x4.nearest (f32x4.mul $by (v128.load offset={16 * h} $x))))))
          (v128.store $to (i16x8.narrow_i32x4_s $v0 $v1))
          (set $to (i32.add $to 16))
          (br_if $eight (i32.lt_u (tee $x (i32.add $x 32)) $i)))
        (br_if $groups (i32.lt_u $x $end)))
      (set $to $scales)
      (br_if $tokens (tee $T (i32.sub $T 1)))))

  (func $largest (param $v v128) (result f32)
    (f32.max (f32.max (f32x4.extract_lane 0 $v) (f32x4.extract_lane 1 $v))
      (f32.max (f32x4.extract_lane 2 $v) (f32x4.extract_lane 3 $v))))

  ;; What `codes` computes, of x as `round` leaves it. Whole numbers are multiplied two at a time.
  (func (export "whole") (param $w i32) (param $x i32) (param $y i32) (param $width i32)
      (param $rows i32) (param $T i32) (param $scale i32)
    (local $last i32) (local $end i32) (local $left i32) (local $from i32) (local $to i32)
    (local $i i32) (local $group i32) (local $scales i32) (local $v v128)
    (each r 4 (local $s{r} v128) (local $d{r} v128))
    (set $last (i32.add $y (i32.mul $rows 4)))
    (loop $rows
      (set $end (i32.add $w (i32.mul $width 4)))
      (set $left $T)
      (set $from $x)
      (set $to $y)
      (loop $tokens
        (set $scales (i32.add $from (i32.mul $width 2)))
        (each r 4 (set $s{r} (v128.const i32x4 0 0 0 0)))
        (set $i $w)
        (loop $groups
          (each r 4 (set $d{r} (v128.const i32x4 0 0 0 0)))
          (set $group (i32.add $i 128))
          (loop $columns
            (each u 2
              (set $v (v128.load offset={16 * u} $from))
              (each r 4 (set $d{r} (i32x4.add $d{r}
                (i32x4.dot_i16x8_s $v (v128.load8x8_s offset={32 * u + 8 * r} $i))))))
            (set $from (i32.add $from 32))
            (br_if $columns (i32.lt_u (tee $i (i32.add $i 64)) $group)))
          (set $v (v128.load32_splat $scales))
          (each r 4 (set $s{r} (madd $s{r} $v (f32x4.convert_i32x4_s $d{r}))))
          (set $scales (i32.add $scales 4))
          (br_if $groups (i32.lt_u $i $end)))
        (v128.store $to (f32x4.mul (call $across $s0 $s1 $s2 $s3) (v128.load $scale)))
        (set $to (i32.add $to (i32.mul $rows 4)))
        (set $from $scales)
        (br_if $tokens (tee $left (i32.sub $left 1))))
      (set $w $end)
      (set $scale (i32.add $scale 16))
      (br_if $rows (i32.lt_u (tee $y (i32.add $y 16)) $last))))

  ;; e^x = 2^n e^r with whole n and |r| <= ln 2 / 2, and the series of e^r. x from -87 to 88
  (func $exp (param $x v128) (result v128)
    (local $n v128) (local $y v128)
    (set $x (f32x4.max (f32x4.splat (f32.const -87)) (f32x4.min (f32x4.splat (f32.const 88)) $x)))
    (set $n (f32x4.nearest (f32x4.mul $x (f32x4.splat (f32.const 1.4426950408889634)))))
    ;; ln 2 in two parts, the first of few bits, so that its product with n is exact
    (set $x (f32x4.sub $x (f32x4.mul $n (f32x4.splat (f32.const 0.693359375)))))
    (set $x (f32x4.add $x (f32x4.mul $n (f32x4.splat (f32.const 2.12194440054690581e-4)))))
    (set $y (f32x4.splat (f32.const {1 / 5040})))
    (each factor ({1 / 720} {1 / 120} {1 / 24} {1 / 6} 0.5 1 1)
      (set $y (f32x4.add (f32x4.mul $y $x) (f32x4.splat (f32.const {factor})))))
    (f32x4.mul $y (i32x4.shl
      (i32x4.add (i32x4.trunc_sat_f32x4_s $n) (v128.const i32x4 127 127 127 127)) (i32.const 23))))

  ;; a = silu(a) b, of count numbers
  (func (export "gate") (param $a i32) (param $b i32) (param $count i32)
    (local $end i32) (local $z v128)
    (set $end (i32.add $a (i32.mul $count 4)))
    (loop $numbers
      (set $z (v128.load $a))
      (v128.store $a (f32x4.mul (v128.load $b) (f32x4.div $z
        (f32x4.add (f32x4.splat (f32.const 1)) (call $exp (f32x4.neg $z))))))
      (set $b (i32.add $b 16))
      (br_if $numbers (i32.lt_u (tee $a (i32.add $a 16)) $end))))

  ;; One head of one token: q (D) reads `count` slots of k and v (slots, D) -> y (D). `scores` has
  ;; room for four more than `count`, and so has k.
  (func (export "attend") (param $q i32) (param $k i32) (param $v i32) (param $y i32)
      (param $count i32) (param $D i32) (param $scale f32) (param $scores i32)
    (local $i i32) (local $end i32) (local $row i32) (local $x v128) (local $most v128)
    (each r 4 (local $k{r} i32) (local $s{r} v128))
    (set $row (i32.mul $D 4))
    (set $end (i32.add $scores (i32.mul $count 4)))
    (set $i $scores)
    (set $k3 $k)
    (set $most (f32x4.splat (f32.const -1e30)))
    (loop $slots                                            ;; four at a time
      (set $k0 $k3)
      (each r (1 2 3) (set $k{r} (i32.add $k0 (i32.mul $row {r}))))
      (each r 4 (set $s{r} (v128.const i32x4 0 0 0 0)))
      (set $k $q)
      (loop $columns
        (set $x (v128.load $k))
        (each r 4
          (set $s{r} (madd $s{r} $x (v128.load $k{r})))
          (set $k{r} (i32.add $k{r} 16)))
        (br_if $columns (i32.lt_u (tee $k (i32.add $k 16)) (i32.add $q $row))))
      (v128.store $i (f32x4.mul (f32x4.splat $scale) (call $across $s0 $s1 $s2 $s3)))
      (br_if $slots (i32.lt_u (tee $i (i32.add $i 16)) $end)))
    (v128.store $end $most)                                 ;; what is beyond the last slot
    (set $i $scores)
    (loop $slots
      (set $most (f32x4.max $most (v128.load $i)))
      (br_if $slots (i32.lt_u (tee $i (i32.add $i 16)) $end)))
    (set $most (f32x4.splat (call $largest $most)))
    (set $x (v128.const i32x4 0 0 0 0))
    (set $i $scores)
    (loop $slots
      (v128.store $i (tee $s0 (call $exp (f32x4.sub (v128.load $i) $most))))
      (set $x (f32x4.add $x $s0))
      (br_if $slots (i32.lt_u (tee $i (i32.add $i 16)) $end)))
    (set $most (call $across $x $x $x $x))                  ;; the sum of the weights
    (set $k (i32.add $v $row))
    (loop $columns                                          ;; sixteen at a time
      (each r 4 (set $s{r} (v128.const i32x4 0 0 0 0)))
      (set $k0 $v)
      (set $i $scores)
      (loop $slots
        (set $x (v128.load32_splat $i))
        (each r 4 (set $s{r} (madd $s{r} $x (v128.load offset={16 * r} $k0))))
        (set $k0 (i32.add $k0 $row))
        (br_if $slots (i32.lt_u (tee $i (i32.add $i 4)) $end)))
      (each r 4 (v128.store offset={16 * r} $y (f32x4.div $s{r} $most)))
      (set $y (i32.add $y 64))
      (br_if $columns (i32.lt_u (tee $v (i32.add $v 64)) $k)))))
